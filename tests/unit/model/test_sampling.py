"""Choosing tokens, against transformers' definitions and against the distribution itself."""

import math
from typing import Any

import pytest
import torch

from dualflow.model.sampling import Sampler, SamplingParams, invert, shape_log_probs

PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 0.6, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.7, "top_k": 30, "top_p": 0.95, "min_p": 0.02},
]


def random_log_probs(seed: int, size: int = 50, spread: float = 2.0) -> torch.Tensor:
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (spread * values).log_softmax(-1)


@pytest.mark.parametrize("fields", PARAMS, ids=str)
def test_cuts_are_those_of_transformers(fields):
    generation = pytest.importorskip("transformers.generation")
    # The order in which transformers builds its list of warpers.
    warpers = [
        generation.TemperatureLogitsWarper(fields.get("temperature", 1.0)),
        *([generation.TopKLogitsWarper(fields["top_k"])] if "top_k" in fields else []),
        *([generation.TopPLogitsWarper(fields["top_p"])] if "top_p" in fields else []),
        *([generation.MinPLogitsWarper(fields["min_p"])] if "min_p" in fields else []),
    ]
    for seed in range(20):
        log_probs_V = random_log_probs(seed)
        theirs = log_probs_V[None]
        for warper in warpers:
            theirs = warper(torch.zeros(1, 0, dtype=torch.long), theirs)
        ours = shape_log_probs(log_probs_V, SamplingParams(**fields))
        torch.testing.assert_close(ours, theirs[0].log_softmax(-1), rtol=1e-12, atol=1e-12)


def test_top_k_keeps_all_that_tie_with_the_k_th():
    log_probs_V = torch.tensor([0.4, 0.2, 0.2, 0.2]).log()
    kept = shape_log_probs(log_probs_V, SamplingParams(top_k=2)) > -math.inf
    assert kept.tolist() == [True, True, True, True]


def test_top_p_takes_the_lowest_ids_of_equally_probable_tokens():
    log_probs_V = torch.full((4,), 0.25).log()
    kept = shape_log_probs(log_probs_V, SamplingParams(top_p=0.5)) > -math.inf
    assert kept.tolist() == [True, True, False, False]


@pytest.mark.parametrize("fields", PARAMS, ids=str)
def test_something_is_always_kept_and_padding_never_is(fields):
    log_probs_V = random_log_probs(0, spread=8.0)
    log_probs_V[40:] = -math.inf
    shaped = shape_log_probs(log_probs_V, SamplingParams(**fields))
    assert shaped[40:].isneginf().all()
    assert shaped.exp().sum() == pytest.approx(1.0)
    sampler = Sampler(SamplingParams(seed=0, **fields))
    assert all(sampler(log_probs_V) < 40 for _ in range(200))


def test_greedy_takes_the_maximum_whatever_the_cuts():
    log_probs_V = random_log_probs(3)
    cuts: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.1}, {"min_p": 0.5}]
    for fields in cuts:
        assert Sampler(SamplingParams(temperature=0, **fields))(log_probs_V) == int(
            log_probs_V.argmax()
        )


@pytest.mark.parametrize("temperature", [1e-30, 1e-320, 1e30])
def test_extreme_temperatures_stay_numbers(temperature):
    log_probs_V = random_log_probs(4)
    shaped = shape_log_probs(log_probs_V, SamplingParams(temperature=temperature))
    assert not shaped.isnan().any()
    if temperature < 1:
        assert Sampler(SamplingParams(temperature=temperature, seed=0))(log_probs_V) == int(
            log_probs_V.argmax()
        )


def test_the_same_seed_gives_the_same_tokens_whatever_else_runs():
    log_probs = [random_log_probs(i) for i in range(50)]
    params = SamplingParams(seed=7)
    alone = [Sampler(params)(log_probs[0])]
    sampler = Sampler(params)
    first = [sampler(x) for x in log_probs]
    one, other = Sampler(params), Sampler(SamplingParams(seed=8))
    second: list[int] = []
    for x in log_probs:
        torch.rand(3)
        other(x)
        second.append(one(x))
    assert first == second
    assert first[:1] == alone


def test_sampling_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    Sampler(SamplingParams())(random_log_probs(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_two_requests_differ():
    log_probs_V = torch.full((1000,), 1e-3).log()
    one, other = Sampler(SamplingParams()), Sampler(SamplingParams())
    assert [one(log_probs_V) for _ in range(20)] != [other(log_probs_V) for _ in range(20)]


def test_frequencies_are_the_probabilities():
    log_probs_V = random_log_probs(5, size=12, spread=1.0)
    params = SamplingParams(temperature=0.8, top_k=9, seed=1)
    expected = shape_log_probs(log_probs_V, params).exp()
    sampler, draws = Sampler(params), 20_000
    counts = torch.bincount(
        torch.tensor([sampler(log_probs_V) for _ in range(draws)]), minlength=12
    )
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    statistic = float(((counts - draws * expected)[kept] ** 2 / (draws * expected[kept])).sum())
    assert statistic < 26.12  # chi-square with 8 degrees of freedom, 99.9 %


def test_every_quantile_falls_on_a_token_that_can_come():
    probs_V = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0], dtype=torch.float64)
    assert invert(probs_V, 0.0) == 1
    assert invert(probs_V, 0.25) == 3
    assert invert(probs_V, math.nextafter(0.25, 0)) == 1
    assert invert(probs_V, math.nextafter(1.0, 0)) == 3
    assert invert(probs_V, 1.0) == 3


@pytest.mark.parametrize("bad", [torch.full((3,), math.nan), torch.tensor([0.0, math.nan, -1.0])])
def test_probabilities_that_are_no_numbers_are_refused(bad):
    with pytest.raises(ValueError, match="NaN"):
        Sampler(SamplingParams(seed=0))(bad)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", v) for v in (-0.1, math.nan, math.inf, "1", True, None)),
        *(("top_k", v) for v in (-1, 1.5, True, "3")),
        *(("top_p", v) for v in (0, 0.0, -0.5, 1.01, math.nan)),
        *(("min_p", v) for v in (-0.01, 1.01, math.nan)),
        *(("seed", v) for v in (-1, 2**63, 1.0, True)),
    ],
)
def test_values_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field} is .*expected"):
        SamplingParams(**{field: value})
