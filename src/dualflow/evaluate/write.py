"""Write what a comparison found into a folder: rows, tables, plots and the report."""

import json
from dataclasses import dataclass
from pathlib import Path

from dualflow.evaluate.compare import Comparison, rows
from dualflow.evaluate.findings import findings
from dualflow.evaluate.plots import Plot, comparison_plots, write_plots
from dualflow.evaluate.report import report_html
from dualflow.evaluate.tables import comparison_tables, markdown_text, to_markdown
from dualflow.extras import MissingExtraError


@dataclass(frozen=True)
class Written:
    """The files that were written, and why there are no plots (None: there are)."""

    files: tuple[Path, ...]
    without_plots: str | None


def write_comparison(
    comparison: Comparison, folder: str | Path, *, title: str = "Comparison of runs"
) -> Written:
    """Write compare.json, compare.md, report.html and, with matplotlib, plots into ``folder``."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a folder to write the comparison into")
    folder.mkdir(parents=True, exist_ok=True)
    plots: list[Plot] = []
    without_plots = None
    try:
        plots = comparison_plots(comparison)
    except MissingExtraError as error:
        without_plots = str(error)
    runs = [run for group in comparison.groups for run in group.runs.values()]
    texts = {
        "compare.json": json.dumps(rows(runs), indent=1, ensure_ascii=False) + "\n",
        "compare.md": comparison_markdown(comparison),
        "report.html": report_html(comparison, plots, title=title),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    files = [folder / name for name in texts]
    return Written((*files, *write_plots(plots, folder)), without_plots)


def comparison_markdown(comparison: Comparison) -> str:
    """Findings and tables in Markdown."""
    said = [
        f"- {markdown_text(sentence)}" for sentence in (*findings(comparison), *comparison.notes)
    ]
    tables = [to_markdown(table) for table in comparison_tables(comparison)]
    return "\n".join(["\n".join(said) + "\n", *tables])
