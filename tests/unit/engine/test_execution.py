"""The choice between one pass and two follows from what they cost."""

import dataclasses

import pytest

from dualflow.engine.execution import (
    OptionalRow,
    StepShape,
    choose_execution,
    execution_seconds,
)
from dualflow.plan.roofline import Machine, model_work
from dualflow.spec import PRESETS

DUAL = dataclasses.replace(PRESETS["smollm2-135m"], variant="dual")
WORK, MACHINE = model_work(DUAL, bytes_per_weight=2), Machine()


def decode(batch: int, keys: int = 200) -> StepShape:
    return StepShape(
        primary_rows=batch, read_rows=batch, aux_positions=0, keys=batch * keys,
        primary_keys=batch * keys, aux_keys=0,
    )  # fmt: skip


def rows(batch: int, share: float, keys: int = 200) -> list[OptionalRow]:
    return [OptionalRow(share, keys)] * batch


@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
def test_one_sequence_reads_its_weights_once(share: float) -> None:
    assert choose_execution(WORK, MACHINE, decode(1), rows(1, share)) == "grouped"


def test_many_sequences_that_seldom_need_it_run_it_later() -> None:
    assert choose_execution(WORK, MACHINE, decode(256), rows(256, 0.2)) == "lazy"
    assert choose_execution(WORK, MACHINE, decode(256), rows(256, 1.0)) == "grouped"


def test_rows_that_are_never_needed_are_not_run() -> None:
    assert choose_execution(WORK, MACHINE, decode(256), rows(256, 0.0)) == "lazy"
    # Where they cost nothing, nothing is put off.
    assert choose_execution(WORK, MACHINE, decode(1), rows(1, 0.0)) == "grouped"


def test_a_second_pass_is_paid_as_often_as_there_is_one() -> None:
    grouped, never = execution_seconds(WORK, MACHINE, decode(4), rows(4, 0.0))
    _, always = execution_seconds(WORK, MACHINE, decode(4), rows(4, 1.0))
    _, half = execution_seconds(WORK, MACHINE, decode(4), rows(4, 0.5))
    assert never <= grouped < half < always
    assert half - never > 0.85 * (always - never)  # one of four needs it nearly always
    _, one = execution_seconds(WORK, MACHINE, decode(1), rows(1, 0.5))
    _, whole = execution_seconds(WORK, MACHINE, decode(1), rows(1, 1.0))
    _, none = execution_seconds(WORK, MACHINE, decode(1), rows(1, 0.0))
    assert one - none == pytest.approx((whole - none) / 2)
