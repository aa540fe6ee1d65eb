"""What a benchmark yields, and the flat row it becomes in results.json."""

import os
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dualflow.bench.timing import Samples, median
from dualflow.train.run_folder import environment

Row = dict[str, Any]
"""One measurement as JSON holds it: ``COLUMNS``, null where a column says nothing about it."""

MACHINE_COLUMNS = ("commit", "machine", "threads", "torch", "started")
"""Columns of every row of every suite: the fields of ``Machine``."""

COLUMNS = (
    "benchmark",
    "case",
    "model",
    "precision",
    "compiled",
    "standard_median",
    "dual_median",
    "naive_median",
    "chunked_median",
    "ratio_of",
    "ratio_median",
    "ratio_min",
    "ratio_max",
    "n",
    "unit",
    "counted_ratio",
    "value_difference",
    *MACHINE_COLUMNS,
)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Two things compared in one setting.

    benchmark, case: what was measured and in which setting; together with ``precision`` and
                     ``compiled`` they name a row.
    model:           the model's name; None where only a part of one was run.
    unit:            of the readings in ``samples``.
    sides:           what the first and second readings are of; the ratio is second / first.
    counted_ratio:   the ratio of the FLOPs counted for both; None where FLOPs are not the point.
    value_difference: |a − b| / |a| of what the two computed, where both compute the same.
    """

    benchmark: str
    case: str
    model: str | None
    precision: str
    compiled: bool
    unit: str
    samples: Samples
    sides: tuple[str, str] = ("standard", "dual")
    counted_ratio: float | None = None
    value_difference: float | None = None

    def row(self, machine: "Machine") -> Row:
        """The measurement as a row, with the machine it was taken on."""
        first, second = self.sides
        ratios = self.samples.ratios
        known: Row = {
            "benchmark": self.benchmark,
            "case": self.case,
            "model": self.model,
            "precision": self.precision,
            "compiled": self.compiled,
            f"{first}_median": rounded(median(self.samples.first)),
            f"{second}_median": rounded(median(self.samples.second)),
            "ratio_of": f"{second} / {first}",
            "ratio_median": rounded(median(ratios)),
            "ratio_min": rounded(min(ratios)),
            "ratio_max": rounded(max(ratios)),
            "n": len(ratios),
            "unit": self.unit,
            "counted_ratio": rounded(self.counted_ratio),
            "value_difference": rounded(self.value_difference),
            **asdict(machine),
        }
        assert known.keys() <= set(COLUMNS)
        return {column: known.get(column) for column in COLUMNS}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where and when measurements were taken; no names of people or hosts.

    commit:   of the source that ran, "-dirty" where it was changed; None for an installed package.
    machine:  the processor and how many cores this process may use.
    threads:  that one operation uses.
    """

    commit: str | None
    machine: str
    threads: int
    torch: str
    started: str


def this_machine() -> Machine:
    """The machine this process runs on, now."""
    known = environment(torch.device("cpu"), ranks=1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Machine(
        commit=known["commit"],
        machine=f"{known['cpu']}, {cores} core{'' if cores == 1 else 's'}",
        threads=known["threads"],
        torch=known["torch"],
        started=known["started"],
    )


def rounded(value: float | None) -> float | None:
    """Six significant digits: more would be noise."""
    return None if value is None else float(f"{value:.6g}")
