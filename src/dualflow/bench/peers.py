"""Rows of the comparison with other engines, and the tables rendered from them alone.

``benchmarks/peers/run.py`` measures; what a reading is, its README says.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dualflow.bench.measurement import rounded
from dualflow.bench.results import number
from dualflow.bench.timing import median
from dualflow.evaluate.tables import NOTHING, Table, markdown_text, to_markdown

Row = dict[str, Any]

FIGURES: Mapping[str, str] = {
    "decode_b1_128": "decode, 1 stream, after 128",
    "decode_b1_1024": "decode, 1 stream, after 1024",
    "prefill_512": "prefill, 512",
    "decode_b8": "decode, 8 streams",
    "decode_b32": "decode, 32 streams",
}
"""What is measured, all in tokens per second, and how a table calls it."""

COLUMNS = (
    "engine", "variant", "precision", "figure", "median", "min", "max", "n", "readings",
    "versions", "commit", "machine", "threads", "started",
)  # fmt: skip

OURS = "dualflow"
ANY = "any"

_BEGIN, _END = "<!-- results -->", "<!-- end of results -->"


def make_row(
    name: tuple[str, str, str],
    figure: str,
    readings: Sequence[float],
    **about: object,
) -> Row:
    """The row of an (engine, variant, precision) with its readings, one for each round, in tokens
    per second; ``about`` holds the last five ``COLUMNS``.
    """
    row = {
        **dict(zip(COLUMNS, (*name, figure), strict=False)),
        "median": rounded(median(readings)),
        "min": rounded(min(readings)),
        "max": rounded(max(readings)),
        "n": len(readings),
        "readings": [rounded(value) for value in readings],
        **about,
    }
    assert row.keys() == set(COLUMNS)
    return {column: row[column] for column in COLUMNS}


def speed_table(rows: Sequence[Row]) -> Table:
    """Every engine, with what it reached in every figure."""
    names = list(dict.fromkeys(_name(row) for row in rows))
    found = {(_name(row), row["figure"]): row for row in rows}
    return Table(
        title="Tokens per second, median (smallest … largest)",
        columns=("engine", "precision", *FIGURES.values()),
        rows=tuple(
            (
                f"{engine}, {variant}",
                precision,
                *(_speed(found.get(((engine, variant, precision), f))) for f in FIGURES),
            )
            for engine, variant, precision in names
        ),
    )


def ratio_table(rows: Sequence[Row]) -> Table:
    """Our standard model against the best peer, and our dual against our standard."""
    lines: list[tuple[str, ...]] = []
    for figure, title in FIGURES.items():
        own = [row for row in rows if row["figure"] == figure]
        precisions = dict.fromkeys(row["precision"] for row in own if row["engine"] != OURS)
        for precision in (*precisions, ANY):
            standard = _best(own, precision, "standard")
            dual = _best(own, precision, "dual")
            peer = _best(own, precision, None)
            if standard is None or peer is None:
                continue
            lines.append(
                (
                    title,
                    precision,
                    f"{peer['engine']} {peer['precision']}, {number(peer['median'])}",
                    f"{standard['precision']}, {number(standard['median'])}",
                    _ratio(standard, peer),
                    NOTHING if dual is None else _ratio(dual, peer),
                    NOTHING if dual is None else _ratio(dual, standard),
                )
            )
    return Table(
        title="Against the best peer",
        columns=(
            "figure",
            "precision",
            "best peer",
            "our standard",
            "standard / peer",
            "dual / peer",
            "dual / standard",
        ),
        rows=tuple(lines),
        caption=(
            "Ratios are medians over rounds of readings taken one after the other. "
            f'"{ANY}": the best precision of each side.'
        ),
    )


def agreement_table(agreement: Sequence[Row]) -> Table:
    """How far greedy tokens are the reference's."""
    return Table(
        title="Greedy tokens that agree",
        columns=("engine", "precision", "agree before the first that differs"),
        rows=tuple(
            (
                f"{entry['engine']}, {entry['variant']}",
                entry["precision"],
                f"{', '.join(map(str, entry['agree']))} of {entry['of']}",
            )
            for entry in agreement
        ),
        caption=(
            "Prompt by prompt, against the first row. The same numbers in float32 give the same "
            "tokens unless two logits are as good as equal; rounded weights may choose others."
        ),
    )


def results_text(results: Mapping[str, Any]) -> str:
    """The measured part of the page."""
    rows = results["rows"]
    versions = {row["engine"]: row["versions"] for row in rows}
    lines = dict.fromkeys(
        f"{row['machine']}, {row['threads']} threads, commit {row['commit'] or 'unknown'}, "
        f"{row['started']}"
        for row in rows
    )
    parts = [
        *(f"- {markdown_text(line)}" for line in lines),
        *(f"- {markdown_text(f'{engine}: {text}')}" for engine, text in versions.items()),
        *(f"- not measured: {markdown_text(text)}" for text in results["failed"]),
        "",
        to_markdown(speed_table(rows)),
        to_markdown(ratio_table(rows)),
        to_markdown(agreement_table(results["agreement"])),
    ]
    return "\n".join(parts)


def with_results(page: str, results: Mapping[str, Any]) -> str:
    """The page with its measured part renewed. Raises ``ValueError`` where it has none."""
    pattern = re.compile(f"{_BEGIN}.*?{_END}", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"the page has no {_BEGIN} … {_END} to put the results between")
    text = f"{_BEGIN}\n\n{results_text(results)}\n{_END}"
    return pattern.sub(lambda _: text, page, count=1)


def _name(row: Row) -> tuple[str, str, str]:
    return row["engine"], row["variant"], row["precision"]


def _speed(row: Row | None) -> str:
    if row is None:
        return NOTHING
    return f"{number(row['median'])} ({number(row['min'])} … {number(row['max'])})"


def _best(rows: Sequence[Row], precision: str, variant: str | None) -> Row | None:
    """The fastest of ours in this variant, or of the peers."""
    chosen = [
        row
        for row in rows
        if (row["engine"] == OURS and row["variant"] == variant if variant else
            row["engine"] != OURS)
        and precision in (ANY, row["precision"])
    ]  # fmt: skip
    return max(chosen, key=lambda row: row["median"], default=None)


def _ratio(row: Row, base: Row) -> str:
    pairs = zip(row["readings"], base["readings"], strict=False)
    return f"{median([a / b for a, b in pairs]):.2f}"
