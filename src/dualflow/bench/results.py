"""results.json of a suite, and the tables rendered from it alone."""

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dualflow.bench import CORE
from dualflow.bench.measurement import COLUMNS, Row
from dualflow.checkpoint.atomic import write_atomic
from dualflow.evaluate.tables import NOTHING, Table, markdown_text, to_markdown
from dualflow.train.run_folder import write_json


@dataclass(frozen=True, kw_only=True)
class Suite:
    """How the rows of a suite are kept and shown.

    name:     as ``dualflow bench`` knows it.
    about:    what the figures are, for the page.
    columns:  that every row has.
    key:      new rows replace those with the same key that a file holds.
    tables:   made from rows alone.
    summary:  one row in one line, for a log.
    order:    of keys in the file; None: as they come.
    """

    name: str
    title: str
    about: str
    columns: tuple[str, ...]
    key: Callable[[Row], Hashable]
    tables: Callable[[Sequence[Row]], list[Table]]
    summary: Callable[[Row], str]
    order: tuple[Hashable, ...] | None = None


_MARK = "<!-- Rendered from {name} by `dualflow bench`; edits are lost. -->"

_CAPTIONS = {
    "training": (
        "Counted: FLOPs of forward and backward by formula, and how far the measured ratio is from "
        "it. The whole step adds clipping and the update, which cost both models nearly the same."
    ),
    "loss-memory": (
        "How far resident memory rises above the inputs, forward and backward, each reading in a "
        'fresh process, with an allocator that gives back what is freed; "as in training": with '
        "one that keeps it for speed, and the chunks that training takes. Naive holds all logits "
        "of both flows at once. Difference: of the value or the gradient's norm, whichever is "
        "larger."
    ),
    "decode": (
        "Eager, batch 1. Counted: FLOPs by formula. The weights and keys and values read, which "
        "bound decoding where they come from memory, are the same for both models."
    ),
    "prefill": (
        "Eager, batch 1, until the first new token is known. Counted: FLOPs by formula, the "
        "auxiliary row of the last position included."
    ),
}


def results_tables(rows: Sequence[Row]) -> list[Table]:
    """One table for every benchmark that has rows."""
    chosen = {name: [row for row in rows if row["benchmark"] == name] for name in CORE}
    return [_table(name, own) for name, own in chosen.items() if own]


def results_markdown(
    rows: Sequence[Row], name: str = "results.json", suite: Suite | None = None
) -> str:
    """A page with the command, the machine and all tables."""
    suite = suite or CORE_SUITE
    parts = [
        _MARK.format(name=name),
        "",
        f"# {suite.title}",
        "",
        f"Written by `dualflow bench {suite.name}` and rendered from `{name}` alone. {suite.about}",
        "",
        *(f"- {markdown_text(line)}" for line in machines(rows)),
        "",
        *(to_markdown(table) for table in suite.tables(rows)),
    ]
    return "\n".join(parts)


def machines(rows: Sequence[Row]) -> list[str]:
    """Where the rows were measured, a line for every machine and source."""
    lines = (
        f"{row['machine']}, {row['threads']} thread{'' if row['threads'] == 1 else 's'}, "
        f"torch {row['torch']}, commit {(row['commit'] or 'unknown')}, {row['started']}"
        for row in rows
    )
    return list(dict.fromkeys(lines))


def check_target(path: Path, suite: Suite | None = None) -> None:
    """Raise ``ValueError`` where results cannot go to ``path``: better before measuring than
    after.
    """
    if path.is_dir() or path.suffix != ".json":
        raise ValueError(f"--out is {path}; expected a file name that ends in .json")
    if path.exists():
        read_results(path, suite)
    page = _page(path)
    if page.exists() and not page.read_text(encoding="utf-8").startswith(_mark(path)):
        raise ValueError(
            f"{page} would be replaced by the rendered results, but something else wrote it; "
            "choose another folder for --out"
        )
    path.parent.mkdir(parents=True, exist_ok=True)


def read_results(path: Path, suite: Suite | None = None) -> list[Row]:
    """The rows of a results.json. Raises ``ValueError`` where it is none of this suite."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    wanted = set((suite or CORE_SUITE).columns)
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and wanted <= row.keys() for row in rows
    ):
        raise ValueError(f"{path} is not a list of benchmark rows; name another file with --out")
    return rows


def write_results(path: Path, rows: Sequence[Row], suite: Suite | None = None) -> list[Path]:
    """Write ``rows`` and the page beside them; returns both paths.

    Rows with other keys that are in the file stay: each row names its machine and commit.
    """
    suite = suite or CORE_SUITE
    measured = {suite.key(row) for row in rows}
    there = read_results(path, suite) if path.exists() else []
    together = [*(row for row in there if suite.key(row) not in measured), *rows]
    if suite.order is not None:
        order = suite.order
        together.sort(key=lambda row: _place(suite.key(row), order))
    write_json(path, together)
    text = results_markdown(read_results(path, suite), path.name, suite)
    page = _page(path)
    write_atomic(page, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return [path, page]


def summary(row: Row) -> str:
    """One row in one line, for a log."""
    first, second = _sides(row)
    mode = ", compiled" if row["compiled"] else ""
    return (
        f"{row['benchmark']}: {row['case']}, {row['precision']}{mode}: "
        f"{number(row[f'{first}_median'])} → {number(row[f'{second}_median'])} {row['unit']} "
        f"({number(row['ratio_median'])}×)"
    )


def number(value: float) -> str:
    """Three significant digits, or all before the point where there are more."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def ratio_text(row: Row) -> str:
    """A row's ratio, with the smallest and the largest in brackets."""
    middle, least, most = (_ratio(row[f"ratio_{name}"]) for name in ("median", "min", "max"))
    return f"{middle} ({least} … {most})"


def _place(key: Hashable, order: tuple[Hashable, ...]) -> int:
    return order.index(key) if key in order else len(order)


def _table(name: str, rows: Sequence[Row]) -> Table:
    first, second = _sides(rows[0])
    unit = rows[0]["unit"]
    last = "counted" if rows[0]["value_difference"] is None else "difference"
    return Table(
        title=f"{name}: {CORE[name]}",
        columns=(
            "case",
            "precision",
            "compiled",
            f"{first} ({unit})",
            f"{second} ({unit})",
            rows[0]["ratio_of"],
            last,
            "n",
        ),
        rows=tuple(_cells(row) for row in rows),
        caption=_CAPTIONS[name],
    )


def _cells(row: Row) -> tuple[str, ...]:
    first, second = _sides(row)
    return (
        row["case"],
        row["precision"],
        "yes" if row["compiled"] else "no",
        number(row[f"{first}_median"]),
        number(row[f"{second}_median"]),
        ratio_text(row),
        _counted(row) if row["value_difference"] is None else f"{row['value_difference']:.0e}",
        str(row["n"]),
    )


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value >= 0.995 else f"{value:.3f}"


def _counted(row: Row) -> str:
    counted = row["counted_ratio"]
    if counted is None:
        return NOTHING
    off = f"{row['ratio_median'] / counted - 1:+.1%}".replace("-", "−")
    return f"{counted:.2f} ({off})"


def _sides(row: Row) -> tuple[str, str]:
    second, _, first = row["ratio_of"].partition(" / ")
    return first, second


def _page(path: Path) -> Path:
    return path.parent / "README.md"


def _mark(path: Path) -> str:
    return _MARK.format(name=path.name)


CORE_SUITE = Suite(
    name="core",
    title="Core benchmarks",
    about=(
        "Both sides of a ratio are measured in turns in one run; a ratio is the median over the "
        "pairs, with the smallest and the largest in brackets. Absolute times differ between "
        "machines and hours; ratios much less."
    ),
    columns=COLUMNS,
    key=lambda row: row["benchmark"],
    tables=results_tables,
    summary=summary,
    order=tuple(CORE),
)
"""The suite ``core``; functions here mean it where no other is named."""
