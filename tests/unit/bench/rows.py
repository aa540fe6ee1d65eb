"""Rows as benchmarks make them, without measuring anything."""

import dataclasses

from dualflow.bench.measurement import Machine, Measurement, Row
from dualflow.bench.timing import Samples

MACHINE = Machine(
    commit="0123abc", machine="Some CPU, 2 cores", threads=2, torch="9.9", started="2000-01-01"
)


def time_measurement(benchmark: str = "decode", **changes: object) -> Measurement:
    measurement = Measurement(
        benchmark=benchmark,
        case="demo, 8 tokens after 128",
        model="demo",
        precision="fp32",
        compiled=False,
        unit="ms/token",
        samples=Samples((1.0, 2.0, 4.0), (2.0, 3.0, 12.0)),
        counted_ratio=1.92,
    )
    return dataclasses.replace(measurement, **changes)


def memory_measurement() -> Measurement:
    return Measurement(
        benchmark="loss-memory",
        case="64 rows × 32 ids, D 8, 4 chunks",
        model=None,
        precision="fp32",
        compiled=False,
        unit="MiB",
        sides=("naive", "chunked"),
        samples=Samples((1000.0,), (125.0,)),
        value_difference=2e-7,
    )


def rows() -> list[Row]:
    return [
        time_measurement("training", compiled=True, unit="ms").row(MACHINE),
        memory_measurement().row(MACHINE),
        time_measurement().row(MACHINE),
    ]
