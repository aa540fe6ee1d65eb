"""Figures of one engine among several: what a measurement yields, its flat row, and its table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from dualflow.bench.engines import SIDES, Side
from dualflow.bench.measurement import MACHINE_COLUMNS, Machine, Row, rounded
from dualflow.bench.results import Suite, number, ratio_text
from dualflow.bench.timing import median
from dualflow.evaluate.tables import NOTHING, Table

COLUMNS = (
    "suite",
    "figure",
    "model",
    "variant",
    "aux",
    "sampling",
    "batch",
    "prompt_tokens",
    "new_tokens",
    "weights",
    "kv_dtype",
    "backend",
    "unit",
    "median",
    "min",
    "max",
    "n",
    "ratio_of",
    "ratio_median",
    "ratio_min",
    "ratio_max",
    "aux_share",
    *MACHINE_COLUMNS,
)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of one side, read several times in turns with those of the other sides.

    name:       such as ``decode_b1_128``; the same for all sides.
    setting:    ``batch``, ``prompt_tokens`` and ``new_tokens``.
    engine:     ``bench.engines.described`` of its engine.
    readings:   in ``unit``, round by round.
    baseline:   those of the standard model with the same sampling, of the same rounds.
    aux_share:  auxiliary positions per new token, over all rounds; None for a standard model.
    """

    name: str
    side: Side
    setting: Mapping[str, int]
    engine: Mapping[str, str]
    unit: str
    readings: Sequence[float]
    baseline: Sequence[float]
    aux_share: float | None

    def row(self, suite: str, machine: Machine) -> Row:
        """The figure as a row, with the machine it was taken on."""
        ratios = [own / base for own, base in zip(self.readings, self.baseline, strict=True)]
        row: Row = {
            "suite": suite,
            "figure": self.name,
            "variant": self.side.variant,
            "aux": self.side.aux,
            "sampling": self.side.sampling,
            **self.setting,
            **self.engine,
            "unit": self.unit,
            "median": rounded(median(self.readings)),
            "min": rounded(min(self.readings)),
            "max": rounded(max(self.readings)),
            "n": len(self.readings),
            "ratio_of": f"{self.side.label} / standard",
            "ratio_median": rounded(median(ratios)),
            "ratio_min": rounded(min(ratios)),
            "ratio_max": rounded(max(ratios)),
            "aux_share": rounded(self.aux_share),
            **asdict(machine),
        }
        assert row.keys() == set(COLUMNS)
        return {column: row[column] for column in COLUMNS}


def figures_of_sides(
    name: str,
    setting: Mapping[str, int],
    unit: str,
    engines: Mapping[str, Mapping[str, str]],
    readings: Mapping[Side, Sequence[float]],
    aux_shares: Mapping[Side, float],
) -> list[Figure]:
    """The figures of all sides of one round-robin; ``engines`` by variant."""
    return [
        Figure(
            name=name,
            side=side,
            setting=setting,
            engine=engines[side.variant],
            unit=unit,
            readings=own,
            baseline=readings[Side(variant="standard", aux=None, sampling=side.sampling)],
            aux_share=None if side.aux is None else aux_shares[side],
        )
        for side, own in readings.items()
    ]


def figure_summary(row: Row) -> str:
    """One row in one line, for a log."""
    share = "" if row["aux_share"] is None else f", auxiliary at {row['aux_share']:.0%}"
    ratio = "" if row["aux"] is None else f" ({row['ratio_median']:.3g}× of standard{share})"
    return (
        f"{row['figure']}, {_side(row)}, {row['sampling']}: {number(row['median'])} "
        f"{row['unit']}{ratio}"
    )


def figure_suite(name: str, title: str, about: str) -> Suite:
    """The suite ``name``, of figures."""
    return Suite(
        name=name,
        title=title,
        about=about,
        columns=COLUMNS,
        key=lambda row: (row["model"], row["weights"], row["kv_dtype"], row["backend"]),
        tables=_tables,
        summary=figure_summary,
    )


def _tables(rows: Sequence[Row]) -> list[Table]:
    """A table for every model and way to run it, a line for every figure and side."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        how = (row["model"], row["weights"], row["kv_dtype"], row["backend"])
        groups.setdefault(how, []).append(row)
    return [_table(how, own) for how, own in groups.items()]


def _table(how: tuple[str, ...], rows: Sequence[Row]) -> Table:
    model, weights, kv_dtype, backend = how
    return Table(
        title=f"{model}: {weights} weights, {kv_dtype} cache, backend {backend}",
        columns=("figure", "model", "tokens", "median", "min … max", "÷ standard", "aux", "n"),
        rows=tuple(_cells(row) for row in sorted(rows, key=_order(rows))),
        caption="÷ standard: of readings of the same round, median (smallest … largest). "
        "aux: auxiliary positions per new token.",
    )


def _order(rows: Sequence[Row]) -> Callable[[Row], tuple[int, int]]:
    """Figures as they came, the sides of each in the order of ``SIDES``."""
    figures = list(dict.fromkeys(row["figure"] for row in rows))
    sides = [(side.variant, side.aux, side.sampling) for side in SIDES]
    return lambda row: (
        figures.index(row["figure"]),
        sides.index((row["variant"], row["aux"], row["sampling"])),
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        f"{row['figure']} ({row['unit']})",
        _side(row),
        row["sampling"],
        number(row["median"]),
        f"{number(row['min'])} … {number(row['max'])}",
        NOTHING if row["aux"] is None else ratio_text(row),
        NOTHING if row["aux_share"] is None else f"{row['aux_share']:.0%}",
        str(row["n"]),
    )


def _side(row: Row) -> str:
    return row["variant"] + ("" if row["aux"] is None else f", aux {row['aux']}")
