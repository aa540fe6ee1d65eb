"""Grouped or lazy: where auxiliary rows may turn out not to be needed, which way costs less. No
torch.

Grouped execution runs them beside the primary's rows and reads every weight once. Lazy execution
runs the primary first, and the auxiliary rows that are needed in a pass of their own: fewer rows,
but a second reading of the weights. The tokens are the same (``aux_rules``).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dualflow.plan.roofline import Machine, ModelWork, PassShape, pass_seconds


@dataclass(frozen=True, slots=True)
class OptionalRow:
    """A position whose auxiliary row may not be needed: the probability that it is, and the keys
    that it attends.
    """

    share: float
    keys: int


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step runs in any case, auxiliary rows that are certain to be needed included."""

    primary_rows: int
    read_rows: int
    aux_positions: int
    keys: int
    primary_keys: int
    aux_keys: int


def choose_execution(
    work: ModelWork, machine: Machine, step: StepShape, optional: Sequence[OptionalRow]
) -> Literal["grouped", "lazy"]:
    """The way whose expected time is shorter; grouped where they are equal."""
    grouped, lazy = execution_seconds(work, machine, step, optional)
    return "lazy" if lazy < grouped else "grouped"


def execution_seconds(
    work: ModelWork, machine: Machine, step: StepShape, optional: Sequence[OptionalRow]
) -> tuple[float, float]:
    """Expected seconds of the step, grouped and lazy. Rows are needed independently."""
    certain = PassShape(
        primary_rows=step.primary_rows,
        aux_positions=step.aux_positions,
        read_rows=step.read_rows,
        keys=step.keys,
        primary_keys=step.primary_keys,
        aux_keys=step.aux_keys,
    )
    everything = PassShape(
        primary_rows=step.primary_rows,
        aux_positions=step.aux_positions + len(optional),
        read_rows=step.read_rows,
        keys=step.keys,
        primary_keys=step.primary_keys,
        aux_keys=step.aux_keys + sum(row.keys for row in optional),
    )
    grouped = pass_seconds(work, machine, everything)
    lazy = pass_seconds(work, machine, certain)
    any_needed = 1 - math.prod(1 - row.share for row in optional)
    if any_needed > 0:
        # The second pass as it is when there is one.
        keys = sum(row.share * row.keys for row in optional) / any_needed
        rows = sum(row.share for row in optional) / any_needed
        second = PassShape(aux_positions=rows, keys=keys, aux_keys=keys)
        lazy += any_needed * pass_seconds(work, machine, second)
    return grouped, lazy
