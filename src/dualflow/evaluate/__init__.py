"""Measure a model's loss; compare finished runs; draw and write what was found.

Names are imported when they are first used: reading and comparing runs needs no torch, and only the
plots need matplotlib.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualflow.evaluate.compare import Comparison, Contrast, compare, compare_runs, rows
    from dualflow.evaluate.experiment import (
        experiment_table,
        read_experiment,
        write_experiment_plot,
    )
    from dualflow.evaluate.findings import findings
    from dualflow.evaluate.groups import Group
    from dualflow.evaluate.loss import EvaluatedLoss, evaluate_loss
    from dualflow.evaluate.plots import comparison_plots, write_plots
    from dualflow.evaluate.report import report_html
    from dualflow.evaluate.runs import Run, RunError, read_run, read_runs
    from dualflow.evaluate.statistics import PairedDifference, Summary
    from dualflow.evaluate.tables import Table, comparison_tables, to_html, to_markdown, to_rich
    from dualflow.evaluate.write import Written, comparison_markdown, write_comparison

__all__ = [
    "Comparison",
    "Contrast",
    "EvaluatedLoss",
    "Group",
    "PairedDifference",
    "Run",
    "RunError",
    "Summary",
    "Table",
    "Written",
    "compare",
    "compare_runs",
    "comparison_markdown",
    "comparison_plots",
    "comparison_tables",
    "evaluate_loss",
    "experiment_table",
    "findings",
    "read_experiment",
    "read_run",
    "read_runs",
    "report_html",
    "rows",
    "to_html",
    "to_markdown",
    "to_rich",
    "write_comparison",
    "write_experiment_plot",
    "write_plots",
]

_HOMES = {
    "compare": ("Comparison", "Contrast", "compare", "compare_runs", "rows"),
    "experiment": ("experiment_table", "read_experiment", "write_experiment_plot"),
    "findings": ("findings",),
    "groups": ("Group",),
    "loss": ("EvaluatedLoss", "evaluate_loss"),
    "plots": ("comparison_plots", "write_plots"),
    "report": ("report_html",),
    "runs": ("Run", "RunError", "read_run", "read_runs"),
    "statistics": ("PairedDifference", "Summary"),
    "tables": ("Table", "comparison_tables", "to_html", "to_markdown", "to_rich"),
    "write": ("Written", "comparison_markdown", "write_comparison"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
