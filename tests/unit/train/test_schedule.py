from itertools import pairwise

import pytest

from dualflow.train.config import ScheduleConfig
from dualflow.train.schedule import effective_warmup, learning_rate_factor


def factors(total: int, **settings: object) -> list[float]:
    config = ScheduleConfig(**settings)  # type: ignore[arg-type]
    return [learning_rate_factor(step, total, config) for step in range(total)]


@pytest.mark.parametrize("kind", ["wsd", "cosine"])
def test_first_step_moves_peak_is_exact_and_last_step_has_the_minimum(kind: str) -> None:
    rates = factors(100, kind=kind, warmup_steps=10, decay_fraction=0.2, min_lr_ratio=0.1)
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[1] == pytest.approx(2 / 11)
    assert rates[9] == pytest.approx(10 / 11)
    assert rates[10] == 1.0
    assert rates[99] == pytest.approx(0.1, abs=1e-15)
    assert max(rates) == 1.0


def test_wsd_is_constant_between_warmup_and_a_linear_decay() -> None:
    rates = factors(100, warmup_steps=10, decay_fraction=0.2, min_lr_ratio=0.0)
    assert rates[10:80] == [1.0] * 70
    assert rates[79] == 1.0
    differences = [rates[i] - rates[i + 1] for i in range(79, 99)]
    assert differences == pytest.approx([0.05] * 20)


def test_cosine_is_half_way_down_in_the_middle_of_its_decay() -> None:
    rates = factors(101, kind="cosine", warmup_steps=0, min_lr_ratio=0.2)
    assert rates[0] == 1.0
    assert rates[50] == pytest.approx(0.6)
    assert all(a >= b for a, b in pairwise(rates))


@pytest.mark.parametrize("kind", ["wsd", "cosine"])
def test_no_warmup_starts_at_the_peak(kind: str) -> None:
    assert factors(50, kind=kind, warmup_steps=0)[0] == 1.0


@pytest.mark.parametrize("kind", ["wsd", "cosine"])
@pytest.mark.parametrize("total", [2, 3, 7, 20])
def test_warmup_longer_than_the_run_is_shortened_to_leave_room_for_the_decay(
    kind: str, total: int
) -> None:
    rates = factors(total, kind=kind, warmup_steps=1000, min_lr_ratio=0.1)
    peak = effective_warmup(total, ScheduleConfig(kind=kind, warmup_steps=1000))  # type: ignore[arg-type]
    assert rates[peak] == 1.0
    assert rates[0] > 0
    assert rates[-1] == pytest.approx(0.1)


def test_a_run_of_one_step_takes_it_at_the_peak() -> None:
    assert factors(1, warmup_steps=100) == [1.0]
    assert factors(1, kind="cosine", warmup_steps=100) == [1.0]


def test_without_decay_the_rate_stays_at_the_peak() -> None:
    assert factors(10, warmup_steps=2, decay_fraction=0.0)[2:] == [1.0] * 8


def test_a_decay_over_the_whole_run_leaves_no_warmup() -> None:
    rates = factors(10, warmup_steps=5, decay_fraction=1.0, min_lr_ratio=0.0)
    assert rates[0] == 1.0
    assert rates[-1] == 0.0


def test_a_step_outside_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match="outside a run of 10 steps"):
        learning_rate_factor(10, 10, ScheduleConfig())
