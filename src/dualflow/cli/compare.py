"""``dualflow compare``: finished runs against a baseline, from their result files alone."""

import argparse

HELP = "compare finished runs: losses paired by seed, costs, plots and a report"

EXAMPLES = """\
dualflow compare runs/demo
dualflow compare runs/standard-seed* runs/dual-seed* --baseline standard --out comparison
"""

DEFAULT_OUT = "runs/compare"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run folder, or a folder that holds run folders"
    )
    parser.add_argument(
        "--baseline",
        metavar="NAME",
        help="variant or run the others are set against (default: standard, else the first)",
    )
    parser.add_argument(
        "--out",
        default=DEFAULT_OUT,
        metavar="DIR",
        help=f"folder for compare.json, plots and report.html (default: {DEFAULT_OUT})",
    )


def run(args: argparse.Namespace) -> int:
    """Print the tables to standard output; write the files and say where on standard error."""
    from rich.markup import escape

    from dualflow.cli.console import output, remarks
    from dualflow.evaluate.compare import compare_runs
    from dualflow.evaluate.findings import findings
    from dualflow.evaluate.tables import comparison_tables, to_rich
    from dualflow.evaluate.write import write_comparison

    comparison = compare_runs(args.runs, args.baseline)
    written = write_comparison(comparison, args.out)
    console = output()
    for table in comparison_tables(comparison)[:3]:  # the curves in full are in the report
        console.print(to_rich(table))
    for sentence in (*findings(comparison), *comparison.notes):
        console.print(escape(f"• {sentence}"), soft_wrap=not console.is_terminal)
    if written.without_plots:
        remarks().print(escape(f"no plots: {written.without_plots}"), soft_wrap=True)
    remarks().print(
        escape("wrote " + ", ".join(str(file) for file in written.files)), soft_wrap=True
    )
    return 0
