"""Temperature and cuts over large vocabularies, against the plain definitions."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from dualflow.engine.request import RequestParams
from dualflow.engine.shaping import Kept, keep, quantile
from dualflow.model.sampling import SamplingParams, invert, shape_log_probs

PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1e-6},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 400},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"top_p": 0.999999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 0.6, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.7, "top_p": 0.95, "min_p": 0.002},
]


def kept_of(log_probs_V: torch.Tensor, fields: dict[str, Any]) -> Kept:
    scores_V = log_probs_V.numpy()
    return keep(scores_V, float(scores_V.max()), RequestParams(**fields))


def rows(size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    flat, wide = (
        spread * torch.randn(size, generator=generator, dtype=torch.float64)
        for spread in (0.5, 3.0)
    )
    steep = -1.5 * torch.arange(1, size + 1).double().log()
    holes = wide.masked_fill(torch.rand(size, generator=generator) < 0.5, -math.inf)
    holes[0] = 0.0
    return [row.log_softmax(-1) for row in (flat, wide, steep, holes)]


@pytest.mark.parametrize("fields", PARAMS, ids=str)
@pytest.mark.parametrize("size", [3, 700, 20_000])
def test_the_distribution_is_that_of_the_plain_sampler(fields, size):
    for log_probs_V in rows(size):
        theirs = shape_log_probs(log_probs_V, SamplingParams(**fields))
        ours = kept_of(log_probs_V, fields).log_probs(size)
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [1, 255, 256, 257, 5000])
def test_quantiles_are_those_of_the_plain_sampler(size):
    weights_N = rows(size)[1].exp().numpy()
    for uniform in [0.0, *np.linspace(0.001, 0.999, 50).tolist(), math.nextafter(1, 0)]:
        assert quantile(weights_N, uniform) == invert(torch.from_numpy(weights_N), uniform)


@pytest.mark.parametrize("size", [10, 600])
def test_a_weight_of_zero_is_never_drawn(size):
    weights_N = np.zeros(size)
    weights_N[[3, size // 2, size - 3]] = 0.1, 1e-300, 0.7
    for uniform in (0.0, 0.1 / 0.8, 0.125, 0.5, math.nextafter(1, 0)):
        assert quantile(weights_N, uniform) in (3, size // 2, size - 3)
    assert quantile(weights_N, 0.0) == 3
    assert quantile(weights_N, math.nextafter(1, 0)) == size - 3


@pytest.mark.parametrize("count", [2, 30, 300])
def test_all_that_tie_with_the_k_th_are_kept(count):
    scores_V = torch.zeros(20_000, dtype=torch.float64)
    scores_V[:5] = torch.arange(5) + 1.0
    kept = kept_of(scores_V, {"top_k": count})
    assert kept.ids_N is not None
    assert len(kept.ids_N) == (2 if count == 2 else 20_000)


def test_top_p_takes_the_lowest_ids_of_many_that_are_equally_probable():
    scores_V = torch.zeros(20_000, dtype=torch.float64)
    scores_V[::2] = -1.0
    share = 5000.5 / (10_000 + 10_000 / math.e)
    kept = kept_of(scores_V, {"top_p": share})
    assert kept.ids_N is not None
    assert kept.ids_N.tolist() == list(range(1, 10_003, 2))
    share = (10_000 + 99.5 / math.e) / (10_000 + 10_000 / math.e)
    kept = kept_of(scores_V, {"top_p": share})
    assert kept.ids_N is not None
    assert kept.ids_N.tolist() == sorted([*range(1, 20_000, 2), *range(0, 200, 2)])


def test_single_precision_rows_are_cut_as_in_double():
    for log_probs_V in rows(5000):
        single_V = log_probs_V.float()
        for fields in PARAMS:
            ours = kept_of(single_V, fields).log_probs(5000)
            theirs = shape_log_probs(single_V, SamplingParams(**fields))
            np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-10, atol=1e-10)
