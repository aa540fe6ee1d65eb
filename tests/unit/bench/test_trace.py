"""Made-up traffic: as long, as often and as often given up as asked for, the same every time."""

import dataclasses

import numpy as np
import pytest

from dualflow.bench.trace import TraceSizes, make_trace, percentiles

SIZES = TraceSizes(requests=2000, segments=4)


def test_the_same_seed_is_the_same_traffic():
    assert make_trace(SIZES, 10.0) == make_trace(SIZES, 10.0)
    assert make_trace(SIZES, 10.0) != make_trace(dataclasses.replace(SIZES, seed=1), 10.0)


def test_every_request_is_in_one_segment_and_arrives_after_the_one_before():
    segments = make_trace(SIZES, 10.0)
    assert len(segments) == 4
    assert [r.number for segment in segments for r in segment] == list(range(2000))
    for segment in segments:
        arrivals = [request.arrival for request in segment]
        assert arrivals == sorted(arrivals) and arrivals[0] > 0


def test_arrivals_are_a_poisson_process_of_the_rate():
    sizes = dataclasses.replace(SIZES, segments=1)
    (segment,) = make_trace(sizes, 10.0)
    gaps = np.diff([0.0, *(request.arrival for request in segment)])
    assert np.mean(gaps) == pytest.approx(0.1, rel=0.1)
    assert np.std(gaps) == pytest.approx(0.1, rel=0.1)  # of exponential gaps: equal to the mean


def test_lengths_are_mixed_and_fit():
    requests = [request for segment in make_trace(SIZES, 10.0) for request in segment]
    prompts = [request.prompt_tokens for request in requests]
    assert np.median(prompts) == pytest.approx(SIZES.prompt_tokens, rel=0.1)
    assert np.median([r.new_tokens for r in requests]) == pytest.approx(SIZES.new_tokens, rel=0.1)
    assert np.std(np.log(prompts)) == pytest.approx(SIZES.spread, rel=0.15)
    assert all(r.prompt_tokens + r.new_tokens <= SIZES.longest for r in requests)
    assert min(r.new_tokens for r in requests) >= 1


def test_a_share_is_given_up_at_every_stage():
    requests = [request for segment in make_trace(SIZES, 10.0) for request in segment]
    aborts = [r for r in requests if r.abort_after is not None]
    assert len(aborts) == 200
    assert all(0 <= (r.abort_after or 0) < r.new_tokens for r in aborts)
    shares = [(r.abort_after or 0) / r.new_tokens for r in aborts]
    assert min(shares) < 0.1 and max(shares) > 0.8


def test_fewer_requests_than_segments():
    assert [len(segment) for segment in make_trace(TraceSizes(requests=2), 1.0)] == [1, 1]


def test_percentiles():
    assert percentiles([]) == (None, None, None)
    assert percentiles([float(v) for v in range(101)]) == (50.0, 90.0, 99.0)
