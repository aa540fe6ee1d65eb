"""Made-up traffic: when requests come, how long they are, and which are given up. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class TraceSizes:
    """What traffic looks like.

    requests:       how many.
    rate:           requests per second on average; None: ``LOAD`` of what the engine was found to
                    manage.
    prompt_tokens, new_tokens: medians of log-normal lengths, whose σ is ``spread``.
    longest:        prompt and new tokens of one request at most, together.
    abort_share:    of requests that are given up, anywhere between their arrival and their end.
    segments:       parts into which the traffic is cut; all policies run a part before the next
                    one begins, so that what drifts on the machine drifts for all.
    seed:           of everything above, and of the requests.
    """

    requests: int = 500
    rate: float | None = None
    prompt_tokens: int = 96
    new_tokens: int = 48
    spread: float = 0.7
    longest: int = 1024
    abort_share: float = 0.1
    segments: int = 5
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """One request of the traffic.

    arrival:      seconds from the start of its segment.
    abort_after:  new tokens after which it is given up, 0: at once; None: it is not.
    """

    number: int
    arrival: float
    prompt_tokens: int
    new_tokens: int
    abort_after: int | None


def make_trace(sizes: TraceSizes, rate: float) -> list[list[TraceRequest]]:
    """The traffic, in segments: arrivals are a Poisson process of ``rate`` per second."""
    random = np.random.default_rng(sizes.seed)
    prompts = _lengths(random, sizes.prompt_tokens, sizes)
    news = np.minimum(_lengths(random, sizes.new_tokens, sizes), sizes.longest - prompts)
    gaps = random.exponential(1.0 / rate, sizes.requests)
    given_up = random.permutation(sizes.requests) < round(sizes.abort_share * sizes.requests)
    aborts = np.floor(random.random(sizes.requests) * news)
    segments: list[list[TraceRequest]] = []
    for numbers in np.array_split(np.arange(sizes.requests), sizes.segments):
        arrivals = np.cumsum(gaps[numbers])
        segments.append(
            [
                TraceRequest(
                    number=int(n), arrival=float(arrival), prompt_tokens=int(prompts[n]),
                    new_tokens=int(news[n]), abort_after=int(aborts[n]) if given_up[n] else None,
                )
                for n, arrival in zip(numbers, arrivals, strict=True)
            ]
        )  # fmt: skip
    return [segment for segment in segments if segment]


def percentiles(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """The 50th, 90th and 99th percentile; None of nothing."""
    if not len(values):
        return None, None, None
    p50, p90, p99 = np.percentile(np.asarray(values), (50, 90, 99))
    return float(p50), float(p90), float(p99)


def _lengths(random: np.random.Generator, middle: int, sizes: TraceSizes) -> np.ndarray:
    """Log-normal lengths; half of ``longest`` at most, so that prompt and new tokens fit."""
    drawn = np.rint(middle * np.exp(sizes.spread * random.standard_normal(sizes.requests)))
    return np.clip(drawn, 1, sizes.longest // 2).astype(int)
