"""One request's tokens from rows of log-probabilities."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dualflow.engine.request import RequestError, RequestParams, StructuredOutput
from dualflow.engine.sampler import RequestSampler
from dualflow.model.sampling import Sampler, SamplingParams

V = 300


def sampler(
    stop_ids: frozenset[int] = frozenset(),
    size: int = V,
    real: int | None = None,
    prompt_ids: Sequence[int] = (1,),
    grammar: "Alternating | None" = None,
    sequence_index: int = 0,
    seed: int = 5,
    **fields: Any,
) -> RequestSampler:
    return RequestSampler(
        RequestParams(**fields),
        vocab_size=size,
        num_real_tokens=size if real is None else real,
        prompt_ids=prompt_ids,
        stop_ids=stop_ids,
        seed=seed,
        sequence_index=sequence_index,
        grammar=grammar,
    )


def row(seed: int, size: int = V, spread: float = 2.0) -> Tensor:
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (spread * values).log_softmax(-1)


class Alternating:
    """Even ids at even positions, odd ones at odd; after three tokens id 0 alone."""

    def allowed(self, output_ids: Sequence[int]) -> Tensor:
        ids = torch.arange(V)
        return ids == 0 if len(output_ids) > 2 else ids % 2 == len(output_ids) % 2

    def accept(self, token_id: int) -> None:
        pass

    ended = False


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_k": 20},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"temperature": 1.3, "top_k": 100, "top_p": 0.95, "min_p": 0.01},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_seeded_tokens_are_those_of_the_naive_generator(fields, dtype):
    for seed in range(5):
        naive = Sampler(SamplingParams(seed=seed, **fields))
        ours = sampler(seed=seed, size=5000, **fields)
        output: list[int] = []
        for step in range(8):
            log_r_V = row(100 * seed + step, 5000).to(dtype)
            output.append(ours.choose(log_r_V, output))
            assert output[-1] == naive(log_r_V)


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.3},
        {"temperature": 0.7, "top_k": 20},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"repetition_penalty": 0.8, "temperature": 1.3, "top_k": 60, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_the_chain_is_that_of_transformers(fields):
    generation = pytest.importorskip("transformers.generation")
    processors = {
        "repetition_penalty": generation.RepetitionPenaltyLogitsProcessor,
        "temperature": generation.TemperatureLogitsWarper,
        "top_k": generation.TopKLogitsWarper,
        "top_p": generation.TopPLogitsWarper,
        "min_p": generation.MinPLogitsWarper,
    }
    prompt, output = [1, 2, 250], [7, 7, 2]
    for seed in range(10):
        theirs = row(seed)[None]
        for name, processor in processors.items():
            if name in fields:
                theirs = processor(fields[name])(torch.tensor([prompt + output]), theirs)
        ours = sampler(prompt_ids=prompt, **fields).shape(row(seed), output)
        torch.testing.assert_close(ours, theirs[0].log_softmax(-1), rtol=1e-10, atol=1e-10)


def test_output_i_is_sampled_with_the_seed_plus_i():
    log_r_V = row(0)
    assert [sampler(seed=9, sequence_index=i).choose(log_r_V, []) for i in range(4)] == [
        sampler(seed=9 + i).choose(log_r_V, []) for i in range(4)
    ]


def test_a_position_gives_the_same_token_in_whatever_order_it_is_computed():
    fields: dict[str, Any] = {"repetition_penalty": 1.5, "min_tokens": 3, "top_p": 0.9}
    first = sampler(frozenset({4}), **fields)
    output: list[int] = []
    for step in range(30):
        output.append(first.choose(row(step), output))
    again = sampler(frozenset({4}), **fields)
    for step in (29, 3, 17, 0, 17, 29):
        assert again.choose(row(step), tuple(output[:step])) == output[step]


def test_greedy_takes_the_known_best_without_looking():
    assert sampler(temperature=0).choose(torch.full((V,), math.nan), [], best=17) == 17


def test_greedy_takes_the_lowest_of_equals():
    log_r_V = torch.zeros(V)
    assert sampler(temperature=0).choose(log_r_V, []) == 0
    assert sampler(temperature=0, logit_bias={0: -1.0}).choose(log_r_V, [], best=0) == 1


def test_greedy_looks_for_itself_where_penalties_or_masks_apply():
    log_r_V = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()
    greedy: dict[str, Any] = {"temperature": 0, "size": 4}
    assert sampler(**greedy, presence_penalty=2).choose(log_r_V, [1], best=1) == 2
    assert sampler(**greedy, repetition_penalty=4.0).choose(log_r_V, [], best=1) == 2
    assert sampler(**greedy, allowed_ids=frozenset({0, 3})).choose(log_r_V, [], best=1) == 3
    stops = frozenset({1})
    assert sampler(stops, **greedy, min_tokens=2).choose(log_r_V, [0], best=1) == 2
    assert sampler(stops, **greedy, min_tokens=2).choose(log_r_V, [0, 0], best=1) == 1


@pytest.mark.parametrize("fields", [{}, {"temperature": 0}, {"logit_bias": {3: 1.0}}], ids=str)
def test_padded_ids_are_never_chosen(fields):
    log_r_V = torch.full((V,), -20.0)
    log_r_V[250:] = -0.01
    padded = sampler(real=250, **fields)
    assert all(padded.choose(log_r_V, [0] * i, best=260) < 250 for i in range(50))
    assert padded.shape(log_r_V, [])[250:].eq(-math.inf).all()
    mask_V = padded.allowed_mask([])
    assert mask_V is not None
    assert mask_V.tolist() == [True] * 250 + [False] * 50


def test_nothing_is_masked_without_a_reason():
    assert sampler(frozenset({3})).allowed_mask([]) is None
    assert sampler(min_tokens=2).allowed_mask([]) is None
    assert sampler(frozenset({3}), min_tokens=2).allowed_mask([7, 7]) is None


def test_the_end_is_forbidden_until_min_tokens():
    mask_V = sampler(frozenset({3, 9}), min_tokens=2).allowed_mask([7])
    assert mask_V is not None
    assert (~mask_V).nonzero()[:, 0].tolist() == [3, 9]


def test_masks_are_combined():
    some = sampler(
        frozenset({4}), allowed_ids=frozenset({1, 2, 4}), min_tokens=1, grammar=Alternating(),
        structured=StructuredOutput("json"),
    )  # fmt: skip
    masks = [some.allowed_mask(output) for output in ([], [2], [2, 1])]
    assert [m.nonzero()[:, 0].tolist() for m in masks if m is not None] == [[2], [1], [2, 4]]
    with pytest.raises(RequestError, match="every token is forbidden here"):
        some.choose(row(0), [2, 1, 4])


def test_a_grammar_at_its_end_outranks_min_tokens():
    ended = sampler(
        frozenset({0}), min_tokens=9, grammar=Alternating(), structured=StructuredOutput("json")
    )
    assert ended.choose(row(0), [2, 1, 4]) == 0


def test_bias_and_masks_come_before_the_cuts():
    log_r_V = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    biased = sampler(size=4, top_k=1, logit_bias={3: 10.0})
    assert biased.shape(log_r_V, []).exp().tolist() == [0, 0, 0, 1]
    masked = sampler(size=4, top_p=0.6, allowed_ids=frozenset({1, 2, 3}))
    assert masked.shape(log_r_V, []).exp().tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0}, {"top_k": 3}, {"presence_penalty": 1.0}], ids=str
)
def test_what_is_no_number_is_refused(value, fields):
    log_r_V = row(0)
    log_r_V[7] = value
    with pytest.raises(ValueError, match="not numbers"):
        sampler(**fields).choose(log_r_V, [2])


def test_the_models_row_stays_as_it_is():
    log_r_V = row(0)
    before = log_r_V.clone()
    cases: list[dict[str, Any]] = [
        {},
        {"logit_bias": {3: 5.0}},
        {"allowed_ids": frozenset({3})},
        {"top_k": 4},
    ]
    for fields in cases:
        sampler(**fields).choose(log_r_V, [])
        sampler(temperature=0.5, **fields).shape(log_r_V, [])
    assert torch.equal(log_r_V, before)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"allowed_ids": frozenset({2, 300})}, "allowed_ids names the token id 300, but the voc"),
        ({"logit_bias": {999: 1.0}}, "logit_bias names the token id 999, but the vocabulary ends"),
        (
            {"allowed_ids": frozenset({4}), "min_tokens": 1, "stop_ids": frozenset({4})},
            "min_tokens is 1, but only stop ids are allowed",
        ),
    ],
)
def test_what_could_never_be_sampled_is_refused_at_once(fields, message):
    with pytest.raises(RequestError, match=message):
        sampler(stop_ids=fields.pop("stop_ids", frozenset()), **fields)


def test_guesses_have_numbers_of_their_own_by_position_and_use():
    ours = sampler()
    numbers = [ours.uniform(i) for i in range(3)]
    for use in ("draft", "accept", "residual"):
        numbers += [ours.draft_uniform(i, use) for i in range(3)]
    assert len(set(numbers)) == 12
    assert sampler().draft_uniform(2, "accept") == ours.draft_uniform(2, "accept")


def test_a_choice_is_described_by_unshaped_rows():
    log_r_V, log_p_V, log_q_V = row(0, 6), row(1, 6), row(2, 6)
    wanting = sampler(size=6, logprobs=2, temperature=0.1)
    choice = wanting.describe(3, log_r_V, log_p_V, log_q_V, 0.75, "p")
    assert (choice.log_r, choice.log_p, choice.log_q) == (log_r_V[3], log_p_V[3], log_q_V[3])
    assert (choice.token_id, choice.alpha, choice.source) == (3, 0.75, "p")
    best = log_r_V.argsort(descending=True)[:2].tolist()
    assert choice.top == tuple((i, float(log_r_V[i])) for i in best)
    assert wanting.wants_logprobs


def test_only_what_is_asked_for_is_described():
    choice = sampler(size=6).describe(3, row(0, 6))
    assert (choice.log_p, choice.log_q, choice.alpha, choice.top) == (None, None, None, ())
    assert not sampler().wants_logprobs
    assert sampler(logprobs=0).wants_logprobs
    assert len(sampler(size=6).describe(3, row(0, 6), top=4).top) == 4
    assert len(sampler(size=6, real=5).describe(3, row(0, 6), top=20).top) == 5
