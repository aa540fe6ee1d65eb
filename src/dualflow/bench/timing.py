"""Paired timing: two things measured in turns, so that what drifts on the machine drifts for both.

Times are wall-clock on the CPU; nothing here waits for an accelerator.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Timed = Callable[[], float]
"""Does the work once and returns the seconds it took; what it prepares first is not counted."""


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
    warm_ups: int = 1,
    what: str = "",
    watcher: Watcher = SILENT,
) -> Samples:
    """``repetitions`` readings of both, in turns; which goes first alternates.

    warm_ups: readings of both that are thrown away before.
    Raises ``ValueError`` for fewer than one repetition.
    """
    if repetitions < 1:
        raise ValueError(f"repetitions is {repetitions}; expected at least 1")
    for _ in range(warm_ups):
        first()
        second()
    pairs: list[tuple[float, float]] = []
    for number in range(repetitions):
        watcher.at(what, number, repetitions)
        if number % 2 == 0:
            a = first()
            b = second()
        else:
            b = second()
            a = first()
        pairs.append((a, b))
    watcher.at(what, repetitions, repetitions)
    return Samples(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
