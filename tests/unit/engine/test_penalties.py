"""Bias and penalties, against transformers and as a function of what was written."""

import numpy as np
import pytest
import torch

from dualflow.engine.penalties import Penalties, common_prefix
from dualflow.engine.request import RequestParams

SIZE = 40


def scores(seed: int) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    return (3 * values).log_softmax(-1).numpy()


def penalised(params: RequestParams, prompt: list[int], output: list[int]) -> np.ndarray:
    scores_V = scores(0)
    Penalties(params, prompt).apply_(scores_V, output)
    return scores_V


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_repetition_is_penalised_as_in_transformers(penalty):
    generation = pytest.importorskip("transformers.generation")
    prompt, output = [3, 1, 3], [7, 7, 9]
    theirs = generation.RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([prompt + output]), torch.from_numpy(scores(0))[None]
    )[0]
    ours = penalised(RequestParams(repetition_penalty=penalty), prompt, output)
    np.testing.assert_array_equal(ours, theirs.numpy())


def test_a_bias_that_makes_a_score_positive_is_divided_by_the_repetition_penalty():
    params = RequestParams(repetition_penalty=2.0, logit_bias={5: 50.0})
    ours = penalised(params, [5], [])
    assert ours[5] == (scores(0)[5] + 50) / 2


def test_presence_and_frequency_count_the_output_alone():
    params = RequestParams(presence_penalty=0.5, frequency_penalty=0.25)
    change = scores(0) - penalised(params, [1, 2, 2], [2, 6, 6, 6])
    expected = np.zeros(SIZE)
    expected[2], expected[6] = 0.75, 1.25
    np.testing.assert_allclose(change, expected, atol=1e-12)


def test_output_that_shrinks_or_changes_is_followed():
    params = RequestParams(presence_penalty=0.5, frequency_penalty=-0.25, repetition_penalty=1.5)
    prompt = [1, 2]
    kept = Penalties(params, prompt)
    generator = torch.Generator().manual_seed(1)
    output: list[int] = []
    for _ in range(200):
        keep, add = torch.randint(0, 60, (2,), generator=generator).tolist()
        tail = torch.randint(0, SIZE, (add // 10,), generator=generator).tolist()
        output = output[: max(0, len(output) - keep // 15)] + tail
        scores_V = scores(0)
        kept.apply_(scores_V, output)
        np.testing.assert_array_equal(scores_V, penalised(params, prompt, output))


def test_more_ids_than_there_was_room_for_are_counted():
    params = RequestParams(frequency_penalty=1.0)
    scores_V = np.zeros(1000)
    Penalties(params, []).apply_(scores_V, [*range(1000), 4])
    assert scores_V[4] == -2
    assert (np.delete(scores_V, 4) == -1).all()


@pytest.mark.parametrize(
    ("known", "now", "expected"),
    [
        ([], [], 0),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 3], 1),
        ([4], [5], 0),
    ],
)
def test_common_prefix(known, now, expected):
    assert common_prefix(known, now) == expected
    assert common_prefix(known, tuple(now)) == expected
