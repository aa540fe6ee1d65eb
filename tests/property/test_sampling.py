"""The whole chain from log-probabilities to a token, against the definitions in plain Python.

penalties and bias → masks → temperature → top-k → top-p → min-p → quantile, for vocabularies small
enough to be sorted whole and large enough to be cut in advance.
"""

import math
from bisect import bisect_right
from collections import Counter
from itertools import accumulate
from typing import Any

import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from dualflow.engine.request import RequestParams
from dualflow.engine.sampler import RequestSampler

EDGE = 1e-9
"""Where a cut is this near to a token, rounding decides; such cases say nothing."""

Rows = tuple[int, int, float, bool]
"""Vocabulary, seed, spread, and whether scores are rounded so that many are equal."""

rows = st.tuples(
    st.sampled_from([1, 2, 7, 64, 130, 1500, 3000]),
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.3, 1.0, 3.0, 8.0]),
    st.booleans(),
)
ids = st.integers(0, 9)
params = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1e-4, 0.3, 0.9, 1.0, 1.5, 20.0]),
        "top_k": st.sampled_from([1, 2, 5, 20, 46, 47, 1400, 10_000]),
        "top_p": st.floats(1e-6, 1.0),
        "min_p": st.floats(0.0, 1.0),
        "repetition_penalty": st.floats(0.25, 4.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "logit_bias": st.dictionaries(ids, st.floats(-100.0, 100.0), max_size=3),
        "allowed_ids": st.frozensets(st.integers(0, 2999), min_size=1, max_size=20),
        "min_tokens": st.integers(0, 4),
    },
)
token_lists = st.lists(ids, max_size=6)


def log_probs(row: Rows) -> list[float]:
    size, seed, spread, rounded = row
    generator = torch.Generator().manual_seed(seed)
    values = spread * torch.randn(size, generator=generator, dtype=torch.float64)
    if rounded:
        return [-abs(round(float(value) * 2)) / 2 for value in values]
    return values.log_softmax(-1).tolist()


def oracle(
    scores: list[float], p: RequestParams, prompt: list[int], output: list[int], stops: set[int]
) -> dict[int, float]:
    """Probabilities of all tokens that may be sampled."""
    scores = list(scores)
    for token, bias in p.logit_bias.items():
        scores[token] += bias
    for token in {*prompt, *output}:
        if scores[token] < 0:
            scores[token] *= p.repetition_penalty
        else:
            scores[token] /= p.repetition_penalty
    for token, count in Counter(output).items():
        scores[token] -= p.frequency_penalty * count
        scores[token] -= p.presence_penalty
    kept = {
        i: score for i, score in enumerate(scores) if p.allowed_ids is None or i in p.allowed_ids
    }
    if len(output) < p.min_tokens:
        kept = {i: score for i, score in kept.items() if i not in stops}
    assume(kept)
    top = max(kept.values())
    if p.greedy:
        return normalised({i: score - top for i, score in kept.items()})
    kept = {i: (score - top) / p.temperature for i, score in kept.items()}
    if 0 < p.top_k < len(kept):
        limit = sorted(kept.values())[-p.top_k]
        kept = {i: score for i, score in kept.items() if score >= limit}
    if p.top_p < 1:
        kept = nucleus(kept, p.top_p)
    if p.min_p > 0:
        shares = {i: math.exp(score) for i, score in kept.items()}
        assume(all(abs(s - p.min_p) > EDGE or s == 1 for s in shares.values()))
        kept = {i: score for i, score in kept.items() if shares[i] >= p.min_p}
    return normalised(kept)


def nucleus(scores: dict[int, float], top_p: float) -> dict[int, float]:
    probs = normalised(scores)
    kept: dict[int, float] = {}
    before = 0.0
    for token in sorted(scores, key=lambda i: (-scores[i], i)):
        assume(abs(before - top_p) > EDGE)
        if before >= top_p:
            break
        kept[token] = scores[token]
        before += probs[token]
    return kept


def normalised(scores: dict[int, float]) -> dict[int, float]:
    weights = {i: math.exp(score) for i, score in scores.items()}
    total = math.fsum(weights.values())
    return {i: weight / total for i, weight in weights.items()}


@given(row=rows, fields=params, prompt=token_lists, output=token_lists, uniform=st.floats(0, 0.999))
@example(row=(3000, 1, 0.0, False), fields={"top_p": 0.5001}, prompt=[], output=[], uniform=0.3)
@example(row=(3000, 1, 0.3, False), fields={"top_p": 0.99}, prompt=[], output=[], uniform=0.3)
@example(row=(3000, 1, 3.0, True), fields={"top_k": 46}, prompt=[], output=[], uniform=0.3)
def test_the_chain_is_its_definition(
    row: Rows, fields: dict[str, Any], prompt: list[int], output: list[int], uniform: float
):
    size, stops = row[0], frozenset({0, 5})
    prompt, output = ([i for i in known if i < size] for known in (prompt, output))
    for name in ("logit_bias", "allowed_ids"):
        if name in fields:
            inside = {i for i in fields[name] if i < size}
            assume(inside)
            fields = fields | {
                name: frozenset(inside)
                if name == "allowed_ids"
                else {i: fields[name][i] for i in inside}
            }
    p = RequestParams(**fields)
    scores = log_probs(row)
    expected = oracle(scores, p, prompt, output, set(stops))
    allowed = set(range(size)) if p.allowed_ids is None else p.allowed_ids
    assume(not p.min_tokens or allowed - stops)
    sampler = RequestSampler(
        p, vocab_size=size + 2, num_real_tokens=size, prompt_ids=prompt, stop_ids=stops, seed=0
    )
    scores_V = torch.tensor([*scores, 99.0, 99.0], dtype=torch.float64)

    probs = sampler.shape(scores_V, output).exp().tolist()

    assert all(
        math.isclose(prob, expected.get(i, 0.0), rel_tol=1e-9, abs_tol=1e-12)
        for i, prob in enumerate(probs)
    )
    assert {i for i, prob in enumerate(probs) if prob > 1e-300} == {
        i for i, prob in expected.items() if prob > 1e-300
    }
    if p.greedy:
        assert expected[sampler.choose(scores_V, output)] == max(expected.values())
        return
    order = sorted(expected)
    ends = list(accumulate(expected[i] for i in order))
    assume(all(abs(end - uniform) > EDGE for end in ends))
    assert sampler.draw(scores_V, output, uniform) == order[bisect_right(ends, uniform)]
