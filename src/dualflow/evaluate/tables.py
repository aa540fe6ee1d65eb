"""Tables as plain data, rendered for a terminal, for Markdown and for HTML. No torch here."""

import html
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dualflow.evaluate.compare import Comparison, Contrast
from dualflow.evaluate.curves import Matched
from dualflow.evaluate.groups import Group
from dualflow.evaluate.statistics import PairedDifference, Summary

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_PREFIXES = ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k"), (0, ""))

NOTHING = "–"
"""What a cell shows where there is no value."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A titled table of text; the first column is left-aligned, the others right-aligned."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""


def loss_table(comparison: Comparison) -> Table:
    """Final validation losses by variant and their differences to the baseline."""
    base = comparison.baseline
    rows = [(*_losses(base), NOTHING, NOTHING)]
    for contrast in comparison.contrasts:
        rows.append((*_losses(contrast.group), difference(contrast.final), wins(contrast.final)))
    return Table(
        title="Final validation loss (nats per token)",
        columns=("variant", "seeds", "tokens", "r", "p", "q", f"r − {base.label}", "lower in"),
        rows=tuple(rows),
        caption=(
            "r is what the model predicts with; p is the primary alone (auxiliary off), q the "
            "auxiliary alone. Mean ± standard error over seeds; differences are paired by seed."
        ),
    )


def cost_table(comparison: Comparison) -> Table:
    """Parameters, FLOPs and KV bytes per token by variant, with ratios to the baseline."""
    rows: list[tuple[str, ...]] = [_costs(comparison.baseline, None)]
    rows += [_costs(contrast.group, contrast) for contrast in comparison.contrasts]
    return Table(
        title="Costs per token",
        columns=(
            "variant",
            "parameters",
            "prefill FLOPs",
            "decode FLOPs",
            "training FLOPs",
            "KV bytes",
        ),
        rows=tuple(rows),
        caption=f"In brackets: times {comparison.baseline.label}. A multiply-add is 2 FLOPs.",
    )


def curve_table(comparison: Comparison, axis: str) -> Table:
    """The curves at equal ``axis`` (``tokens`` or ``training FLOPs``), a row per reading."""
    base = comparison.baseline.label
    rows: list[tuple[str, ...]] = []
    for contrast in comparison.contrasts:
        readings = contrast.tokens if axis == "tokens" else contrast.flops
        rows += [_reading(contrast.group.label, matched, axis) for matched in readings]
    columns = ("variant", f"at {axis}", f"{base} r", "variant r", "difference", "lower in")
    if axis != "tokens":
        columns = (*columns, "tokens read at")
    caption = "Losses between two validations are interpolated linearly in tokens."
    if axis != "tokens":
        caption += (
            f" Tokens read at: {base}'s, then the variant's; * marks a run read before its own end,"
            " when its learning-rate schedule had not ended: a run planned for this budget would"
            " do better there."
        )
    return Table(
        title=f"Validation loss at equal {axis}", columns=columns, rows=tuple(rows), caption=caption
    )


def comparison_tables(comparison: Comparison) -> tuple[Table, ...]:
    """All tables of a comparison that have rows."""
    tables = [loss_table(comparison), cost_table(comparison)]
    tables += [curve_table(comparison, "training FLOPs"), curve_table(comparison, "tokens")]
    return tuple(table for table in tables if table.rows)


def to_markdown(table: Table) -> str:
    """The table in GitHub's Markdown, with its title and caption."""
    alignment = [":---", *(["---:"] * (len(table.columns) - 1))]
    lines = [f"**{markdown_text(table.title)}**", ""]
    for cells in (table.columns, alignment, *table.rows):
        lines.append("| " + " | ".join(markdown_text(cell) for cell in cells) + " |")
    if table.caption:
        lines += ["", markdown_text(table.caption)]
    return "\n".join(lines) + "\n"


def to_html(table: Table) -> str:
    """The table as HTML, everything escaped."""
    head = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in table.columns)
    body = "".join(
        f'<tr><th scope="row">{html.escape(row[0])}</th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in row[1:])
        + "</tr>\n"
        for row in table.rows
    )
    caption = f"<p class=note>{html.escape(table.caption)}</p>\n" if table.caption else ""
    return (
        f"<h2>{html.escape(table.title)}</h2>\n<div class=scroll><table>\n"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>\n{caption}"
    )


def to_rich(table: Table) -> "RichTable":
    """The table for a rich console; nothing in it is read as markup."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    rendered = RichTable(
        title=Text(table.title, style="bold"),
        title_justify="left",
        caption=Text(table.caption, style="dim") if table.caption else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for number, column in enumerate(table.columns):
        rendered.add_column(Text(column), justify="right" if number else "left")
    for row in table.rows:
        rendered.add_row(*(Text(cell) for cell in row))
    return rendered


def mean(summary: Summary | None) -> str:
    """``2.8871 ± 0.0035``; the mean alone for a single value."""
    if summary is None:
        return NOTHING
    if summary.standard_error is None:
        return f"{summary.mean:.4f}"
    return f"{summary.mean:.4f} ± {summary.standard_error:.4f}"


def difference(paired: PairedDifference | None) -> str:
    """``−0.0412 ± 0.0105``, always signed."""
    if paired is None:
        return NOTHING
    text = signed(paired.summary.mean)
    error = paired.summary.standard_error
    return text if error is None else f"{text} ± {error:.4f}"


def wins(paired: PairedDifference | None) -> str:
    """``4 of 5``: in how many pairs the variant is lower."""
    return NOTHING if paired is None else f"{paired.wins} of {paired.summary.count}"


def signed(value: float) -> str:
    """``+0.0123`` or ``−0.0123``; what rounds to nothing has no sign."""
    rounded = f"{abs(value):.4f}"
    if float(rounded) == 0:
        return rounded
    return ("−" if value < 0 else "+") + rounded


def quantity(value: float) -> str:
    """Three significant digits with a prefix: ``6.12 M``."""
    if abs(value) < 0.9995:
        return f"{value:.3g}"
    # 999.6 k would be shown as 1000 k: it belongs to the next prefix.
    power, prefix = next(
        (power, prefix) for power, prefix in _PREFIXES if abs(value) >= 0.9995 * 10**power
    )
    scaled = value / 10**power
    digits = 2 - math.floor(math.log10(abs(scaled)) + 0.0003)
    return f"{scaled:.{max(0, digits)}f} {prefix}".rstrip()


def _losses(group: Group) -> tuple[str, ...]:
    tokens = {run.result.tokens for run in group.runs.values()}
    return (
        group.label,
        str(len(group.runs)),
        " … ".join(quantity(count) for count in sorted({min(tokens), max(tokens)})),
        mean(group.final_summary()),
        mean(group.final_summary("p")),
        mean(group.final_summary("q")),
    )


def _costs(group: Group, contrast: Contrast | None) -> tuple[str, ...]:
    result = group.first.result
    ratios: Mapping[str, float] = contrast.cost_ratios if contrast else {}

    def cell(text: str, cost: str) -> str:
        return f"{text} ({ratios[cost]:.2f}×)" if cost in ratios else text

    return (
        group.label,
        cell(f"{result.params:,}", "params"),
        cell(quantity(result.prefill_flops_per_token), "prefill_flops_per_token"),
        cell(quantity(result.decode_flops_per_token), "decode_flops_per_token"),
        cell(quantity(result.train_flops_per_token), "train_flops_per_token"),
        cell(f"{result.kv_bytes_per_token:,.0f}", "kv_bytes_per_token"),
    )


def _reading(label: str, matched: Matched, axis: str) -> tuple[str, ...]:
    cells = (
        label,
        quantity(matched.budget),
        mean(matched.baseline.losses),
        mean(matched.group.losses),
        difference(matched.difference),
        wins(matched.difference),
    )
    if axis == "tokens":
        return cells
    sides = (matched.baseline, matched.group)
    read = [quantity(side.tokens) + ("*" if side.cut_short else "") for side in sides]
    return (*cells, ", ".join(read))


def markdown_text(text: str) -> str:
    """Text that Markdown shows as it is, even inside a table."""
    for character in "\\`*_[]<>|":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
