"""Pairs are taken in turns, and both sides of a ratio come from the same moment."""

import pytest

from dualflow.bench.timing import Samples, in_turns, paired


class Clock:
    """Work that takes as long as it is told, and remembers who was called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.slowness = 1.0

    def side(self, name: str, seconds: float):
        def timed() -> float:
            self.calls.append(name)
            self.slowness += 0.1  # the machine drifts
            return seconds * self.slowness

        return timed


def test_the_sides_take_turns_and_who_goes_first_alternates():
    clock = Clock()
    paired(clock.side("a", 1.0), clock.side("b", 2.0), 3)
    assert "".join(clock.calls[3:]) == "abbaab"


def test_short_work_is_called_several_times_for_one_reading():
    clock = Clock()
    samples = paired(clock.side("a", 0.005), clock.side("b", 0.005), 2, min_seconds=0.05)
    calls = "".join(clock.calls[3:])
    assert set(calls.split("ab")[0]) == {"a"} and len(calls) > 8
    assert calls.count("a") == calls.count("b")
    assert max(samples.first) < 0.05


def test_drift_cancels_in_the_ratio():
    clock = Clock()
    samples = paired(clock.side("a", 1.0), clock.side("b", 2.0), 20)
    assert max(samples.first) > 2 * min(samples.first)
    assert all(ratio == pytest.approx(2.0, rel=0.1) for ratio in samples.ratios)


def test_the_watcher_sees_the_beginning_and_the_end():
    seen: list[tuple[str, int, int]] = []

    class Watcher:
        def at(self, what: str, done: int, total: int) -> None:
            seen.append((what, done, total))

        def note(self, text: str) -> None:
            raise AssertionError(text)

    clock = Clock()
    paired(clock.side("a", 1), clock.side("b", 1), 2, what="x", watcher=Watcher())
    assert seen == [("x", 0, 2), ("x", 1, 2), ("x", 2, 2)]


def test_no_repetitions_are_refused():
    with pytest.raises(ValueError, match="repetitions is 0; expected at least 1"):
        paired(lambda: 1.0, lambda: 1.0, 0)


def test_samples_in_another_unit():
    samples = Samples((1.0, 2.0), (3.0, 5.0)).scaled(1000)
    assert samples.first == (1000, 2000)
    assert samples.ratios == (3.0, 2.5)


def test_many_sides_take_turns_and_who_goes_first_moves_on():
    calls: list[str] = []

    def work(name: str):
        def run() -> int:
            calls.append(name)
            return len(calls)

        return run

    readings = in_turns([work("a"), work("b"), work("c")], 3)
    assert "".join(calls[3:]) == "abcbcacab"
    assert [len(own) for own in readings] == [3, 3, 3]
    assert readings[0] == [4, 9, 11]


def test_no_rounds_are_refused():
    with pytest.raises(ValueError, match="repetitions is 0"):
        in_turns([lambda: 1], 0)
