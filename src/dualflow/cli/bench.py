"""``dualflow bench``: measure on this machine, and write down what was measured."""

import argparse
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from dualflow.bench import CORE

if TYPE_CHECKING:
    from dualflow.bench.measurement import Row

HELP = "measure training, memory, decode and prefill on this machine, dual against standard"

EXAMPLES = """\
dualflow bench
dualflow bench --quick
dualflow bench core --only decode --only prefill --threads 2
"""

SUITES = ("core",)
"""Suites of ``dualflow.bench``, each a module there; the first is the default."""

DEFAULT_OUT = "benchmarks/core/results.json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "suite", nargs="?", default=SUITES[0], choices=SUITES, help=f"default: {SUITES[0]}"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes, under a minute, to see that all runs; writes nothing without --out",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=tuple(CORE),
        metavar="NAME",
        help=f"measure this alone; repeatable: {', '.join(CORE)}",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help=f"where the rows go, with a README.md beside them (default: {DEFAULT_OUT})",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads (default: PyTorch's choice)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure; tables go to standard output, progress and file names to standard error."""
    if args.threads is not None and args.threads < 1:
        raise ValueError(f"--threads is {args.threads}; expected at least 1")
    import torch
    from rich.markup import escape

    from dualflow.bench.core import full_sizes, measure_core, quick_sizes
    from dualflow.bench.measurement import this_machine
    from dualflow.bench.results import (
        check_target,
        machines,
        results_tables,
        write_results,
    )
    from dualflow.cli.console import output, remarks
    from dualflow.evaluate.tables import to_rich

    out = Path(args.out or DEFAULT_OUT) if args.out or not args.quick else None
    if out is not None:
        check_target(out)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    machine = this_machine()
    sizes = quick_sizes() if args.quick else full_sizes()
    rows: list[Row] = []
    with _Progress() as progress:
        for measurement in measure_core(args.only or tuple(CORE), sizes=sizes, watcher=progress):
            rows.append(measurement.row(machine))
            progress.measured(rows[-1])
    console = output()
    for table in results_tables(rows):
        console.print(to_rich(table))
    for line in machines(rows):
        console.print(escape(line), soft_wrap=True)
    if out is None:
        remarks().print("a quick run: nothing was written (--out FILE keeps it)")
    else:
        written = ", ".join(str(path) for path in write_results(out, rows))
        remarks().print(escape(f"wrote {written}"), soft_wrap=True)
    return 0


class _Progress:
    """A ``bench.timing.Watcher``: a bar on standard error, and a line for whatever is measured."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed

        from dualflow.cli.console import remarks

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            Elapsed(),
            console=remarks(),
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> "_Progress":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def at(self, what: str, done: int, total: int) -> None:
        self._bar.update(self._task, description=what, completed=done, total=total)

    def note(self, text: str) -> None:
        self._bar.console.print(text, markup=False, soft_wrap=True)

    def measured(self, row: "Row") -> None:
        """Say what a finished measurement found."""
        from dualflow.bench.results import summary

        self.note(summary(row))
