"""Paired timing: two things measured in turns, so that what drifts on the machine drifts for both.

Times are wall-clock on the CPU; nothing here waits for an accelerator.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

Timed = Callable[[], float]
"""Does the work once and returns the seconds it took; what it prepares first is not counted."""

Reading = TypeVar("Reading")

MIN_READING_SECONDS = 0.05
"""Readings shorter than this are made of several calls."""

_SHORTEST = 1e-4
"""Seconds; bounds the calls of a reading where one call takes no time at all."""


class Watcher(Protocol):
    """Who is told how far a measurement is."""

    def at(self, what: str, done: int, total: int) -> None:
        """``done`` of ``total`` repetitions of ``what`` are over."""

    def note(self, text: str) -> None:
        """Something a person should know, such as what could not be measured."""


class Silent:
    """A watcher that says nothing."""

    def at(self, what: str, done: int, total: int) -> None:
        pass

    def note(self, text: str) -> None:
        pass


SILENT = Silent()


@dataclass(frozen=True)
class Samples:
    """Readings of two things, pair by pair: ``first[i]`` and ``second[i]`` were taken one after
    the other.
    """

    first: tuple[float, ...]
    second: tuple[float, ...]

    def __post_init__(self) -> None:
        assert self.first and len(self.first) == len(self.second)

    @property
    def ratios(self) -> tuple[float, ...]:
        """The second reading over the first, of every pair."""
        return tuple(b / a for a, b in zip(self.first, self.second, strict=True))

    def scaled(self, factor: float) -> "Samples":
        """The same readings in another unit."""
        return Samples(
            tuple(value * factor for value in self.first),
            tuple(value * factor for value in self.second),
        )


def median(values: Sequence[float]) -> float:
    """The middle value; the mean of the two middle ones of an even number."""
    return float(statistics.median(values))


def seconds_of(work: Callable[[], object]) -> float:
    """How long one call of ``work`` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def paired(
    first: Timed,
    second: Timed,
    repetitions: int,
    *,
    min_seconds: float = MIN_READING_SECONDS,
    what: str = "",
    watcher: Watcher = SILENT,
) -> Samples:
    """``repetitions`` readings of both, in turns; which goes first alternates.

    A reading is the mean over as many calls as take ``min_seconds``, the same number for both, so
    that the odd interruption does not decide a short one. One call of each is thrown away before.
    Raises ``ValueError`` for fewer than one repetition.
    """
    if repetitions < 1:
        raise ValueError(f"repetitions is {repetitions}; expected at least 1")
    second()
    first()
    calls = max(1, math.ceil(min_seconds / max(first(), _SHORTEST)))
    readings: list[tuple[float, float]] = []
    for number in range(repetitions):
        watcher.at(what, number, repetitions)
        if number % 2 == 0:
            a = _mean(first, calls)
            b = _mean(second, calls)
        else:
            b = _mean(second, calls)
            a = _mean(first, calls)
        readings.append((a, b))
    watcher.at(what, repetitions, repetitions)
    return Samples(tuple(a for a, _ in readings), tuple(b for _, b in readings))


def in_turns(
    works: Sequence[Callable[[], Reading]],
    repetitions: int,
    *,
    what: str = "",
    watcher: Watcher = SILENT,
) -> list[list[Reading]]:
    """``repetitions`` readings of each of ``works``, round by round; who goes first moves on by one
    each round. Returns those of each work; one call of each is thrown away before.

    Raises ``ValueError`` for fewer than one repetition.
    """
    if repetitions < 1:
        raise ValueError(f"repetitions is {repetitions}; expected at least 1")
    readings: list[list[Reading]] = [[] for _ in works]
    for number in range(-1, repetitions):
        watcher.at(what, max(number, 0), repetitions)
        first = number % len(works)
        for index in (*range(first, len(works)), *range(first)):
            reading = works[index]()
            if number >= 0:
                readings[index].append(reading)
    watcher.at(what, repetitions, repetitions)
    return readings


def _mean(timed: Timed, calls: int) -> float:
    return sum(timed() for _ in range(calls)) / calls
