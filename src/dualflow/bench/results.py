"""results.json of a suite, and the tables rendered from it alone."""

import json
from collections.abc import Sequence
from pathlib import Path

from dualflow.bench import CORE
from dualflow.bench.measurement import COLUMNS, Row
from dualflow.checkpoint.atomic import write_atomic
from dualflow.evaluate.tables import NOTHING, Table, markdown_text, to_markdown
from dualflow.train.run_folder import write_json

COMMAND = "dualflow bench core"

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


def results_markdown(rows: Sequence[Row], name: str = "results.json") -> str:
    """A page with the command, the machine and all tables."""
    parts = [
        _MARK.format(name=name),
        "",
        "# Core benchmarks",
        "",
        f"Written by `{COMMAND}` and rendered from `{name}` alone. Both sides of a ratio are "
        "measured in turns in one run; a ratio is the median over the pairs, with the smallest "
        "and the largest in brackets. Absolute times differ between machines and hours; ratios "
        "much less.",
        "",
        *(f"- {markdown_text(line)}" for line in machines(rows)),
        "",
        *(to_markdown(table) for table in results_tables(rows)),
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


def check_target(path: Path) -> None:
    """Raise ``ValueError`` where results cannot go to ``path``: better before measuring than
    after.
    """
    if path.is_dir() or path.suffix != ".json":
        raise ValueError(f"--out is {path}; expected a file name that ends in .json")
    if path.exists():
        read_results(path)
    page = _page(path)
    if page.exists() and not page.read_text(encoding="utf-8").startswith(_mark(path)):
        raise ValueError(
            f"{page} would be replaced by the rendered results, but something else wrote it; "
            "choose another folder for --out"
        )
    path.parent.mkdir(parents=True, exist_ok=True)


def read_results(path: Path) -> list[Row]:
    """The rows of a results.json. Raises ``ValueError`` where it is none."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    wanted = set(COLUMNS)
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and wanted <= row.keys() for row in rows
    ):
        raise ValueError(f"{path} is not a list of benchmark rows; name another file with --out")
    return rows


def write_results(path: Path, rows: Sequence[Row]) -> list[Path]:
    """Write ``rows`` and the page beside them; returns both paths.

    Rows of other benchmarks that are in the file stay: each row names its machine and commit.
    """
    measured = {row["benchmark"] for row in rows}
    kept = [row for row in read_results(path) if row["benchmark"] not in measured] if (
        path.exists()
    ) else []  # fmt: skip
    order = list(CORE)
    together = sorted(
        [*kept, *rows],
        key=lambda row: order.index(row["benchmark"]) if row["benchmark"] in CORE else len(order),
    )
    write_json(path, together)
    text = results_markdown(read_results(path), path.name)
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
        f"{_ratio(row['ratio_median'])} ({_ratio(row['ratio_min'])} … {_ratio(row['ratio_max'])})",
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
