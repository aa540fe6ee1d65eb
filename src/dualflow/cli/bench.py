"""``dualflow bench``: measure on this machine, and write down what was measured."""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dualflow.bench import CORE, SUITES
from dualflow.cli.request_options import BACKENDS, KV_DTYPES, WEIGHTS

if TYPE_CHECKING:
    from dualflow.bench.engines import Settings
    from dualflow.bench.measurement import Machine, Row
    from dualflow.bench.results import Suite
    from dualflow.bench.timing import Watcher

HELP = "measure training, memory, decode, prefill and the engine on this machine"

EXAMPLES = """\
dualflow bench
dualflow bench --quick
dualflow bench core --only decode --only prefill --threads 2
dualflow bench latency --quick
dualflow bench throughput --weights bfloat16 --model runs/demo/dual-seed0
dualflow bench serve-trace --requests 500 --rate 2
"""

DEFAULT = next(iter(SUITES))

_OF_SUITES: dict[str, tuple[str, ...]] = {
    "only": ("core",),
    "model": ("latency", "throughput", "serve-trace"),
    "weights": ("latency", "throughput", "serve-trace"),
    "kv_dtype": ("latency", "throughput", "serve-trace"),
    "backend": ("latency", "throughput", "serve-trace"),
    "requests": ("serve-trace",),
    "rate": ("serve-trace",),
    "seed": ("serve-trace",),
}
"""Options that some suites alone know, by their names in the arguments."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    listing = "; ".join(f"{name}: {what}" for name, what in SUITES.items())
    parser.add_argument(
        "suite", nargs="?", default=DEFAULT, choices=tuple(SUITES),
        help=f"{listing} (default: {DEFAULT})",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true",
        help="small sizes, under a minute, to see that all runs; writes nothing without --out",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="FILE",
        help="where the rows go, with a README.md beside them "
        "(default: benchmarks/SUITE/results.json)",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads (default: PyTorch's choice)"
    )
    core = parser.add_argument_group("core")
    core.add_argument(
        "--only", action="append", choices=tuple(CORE), metavar="NAME",
        help=f"measure this alone; repeatable: {', '.join(CORE)}",
    )  # fmt: skip
    engine = parser.add_argument_group("latency, throughput, serve-trace")
    engine.add_argument(
        "--model", metavar="MODEL",
        help="a standard or dual model or run folder; its counterpart is made of it "
        "(default: random values in SmolLM2-135M's shape; with --quick in a tiny one)",
    )  # fmt: skip
    engine.add_argument("--weights", choices=WEIGHTS, help="number format (default: as stored)")
    engine.add_argument("--kv-dtype", choices=KV_DTYPES, help="of the KV cache")
    engine.add_argument("--backend", choices=BACKENDS, help="our kernels, or PyTorch")
    trace = parser.add_argument_group("serve-trace")
    trace.add_argument("--requests", type=int, metavar="N", help="how many (default: 500)")
    trace.add_argument(
        "--rate", type=float, metavar="R",
        help="requests per second (default: 70%% of what the engine is found to manage)",
    )  # fmt: skip
    trace.add_argument("--seed", type=int, metavar="N", help="of the traffic (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Measure; tables go to standard output, progress and file names to standard error.

    1 where requests were lost or pages leaked.
    """
    _check(args)
    import torch
    from rich.markup import escape

    from dualflow.bench.measurement import this_machine
    from dualflow.bench.results import check_target, machines, write_results
    from dualflow.cli.console import output, remarks
    from dualflow.evaluate.tables import to_rich

    suite = _suite(args.suite)
    keeps = args.out or not args.quick
    out = Path(args.out or f"benchmarks/{args.suite}/results.json") if keeps else None
    if out is not None:
        check_target(out, suite)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    rows: list[Row] = []
    with _Progress(suite) as progress:
        for row in _MEASURE[args.suite](args, this_machine(), progress):
            rows.append(row)
            progress.measured(row)
    console = output()
    for table in suite.tables(rows):
        console.print(to_rich(table))
    for line in machines(rows):
        console.print(escape(line), soft_wrap=True)
    if out is None:
        remarks().print("a quick run: nothing was written (--out FILE keeps it)")
    else:
        written = ", ".join(str(path) for path in write_results(out, rows, suite))
        remarks().print(escape(f"wrote {written}"), soft_wrap=True)
    return int(any(row.get(name) for row in rows for name in ("lost", "failed", "pages_leaked")))


def _check(args: argparse.Namespace) -> None:
    for name, suites in _OF_SUITES.items():
        if getattr(args, name) is not None and args.suite not in suites:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} belongs to {', '.join(suites)}, not to {args.suite}")
    for name in ("threads", "requests"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}; expected at least 1")
    if args.rate is not None and not 0 < args.rate < float("inf"):
        raise ValueError(f"--rate is {args.rate}; expected requests per second, above 0")
    if args.seed is not None and args.seed < 0:
        raise ValueError(f"--seed is {args.seed}; expected at least 0")


def _suite(name: str) -> "Suite":
    if name == "core":
        from dualflow.bench.results import CORE_SUITE

        return CORE_SUITE
    if name == "latency":
        from dualflow.bench import latency

        return latency.SUITE
    if name == "throughput":
        from dualflow.bench import throughput

        return throughput.SUITE
    from dualflow.bench import serve_trace

    return serve_trace.SUITE


def _core(args: argparse.Namespace, machine: "Machine", watcher: "Watcher") -> Iterator["Row"]:
    from dualflow.bench.core import full_sizes, measure_core, quick_sizes

    sizes = quick_sizes() if args.quick else full_sizes()
    for measurement in measure_core(args.only or tuple(CORE), sizes=sizes, watcher=watcher):
        yield measurement.row(machine)


def _latency(args: argparse.Namespace, machine: "Machine", watcher: "Watcher") -> Iterator["Row"]:
    from dualflow.bench.latency import QUICK, measure_latency

    sizes = QUICK if args.quick else None
    for figure in measure_latency(_settings(args), sizes, watcher):
        yield figure.row("latency", machine)


def _throughput(
    args: argparse.Namespace, machine: "Machine", watcher: "Watcher"
) -> Iterator["Row"]:
    from dualflow.bench.throughput import QUICK, measure_throughput

    sizes = QUICK if args.quick else None
    for figure in measure_throughput(_settings(args), sizes, watcher):
        yield figure.row("throughput", machine)


def _serve_trace(
    args: argparse.Namespace, machine: "Machine", watcher: "Watcher"
) -> Iterator["Row"]:
    import dataclasses

    from dualflow.bench.serve_trace import QUICK, TraceSizes, measure_serve_trace

    asked = {name: getattr(args, name) for name in ("requests", "rate", "seed")}
    changes = {name: value for name, value in asked.items() if value is not None}
    sizes = dataclasses.replace(QUICK if args.quick else TraceSizes(), **changes)
    yield from measure_serve_trace(_settings(args), sizes, watcher).rows(machine)


_MEASURE: dict[str, Callable[[argparse.Namespace, "Machine", "Watcher"], Iterator["Row"]]] = {
    "core": _core,
    "latency": _latency,
    "throughput": _throughput,
    "serve-trace": _serve_trace,
}
assert _MEASURE.keys() == SUITES.keys()


def _settings(args: argparse.Namespace) -> "Settings":
    """Quick runs without a model take a tiny one."""
    from dualflow.bench.engines import Settings

    known: dict[str, Any] = {"threads": args.threads}
    if args.model is not None:
        known["model"] = Path(args.model)
    elif args.quick:
        known |= {"preset": "demo", "layers": 2}
    asked = {name: getattr(args, name) for name in ("weights", "kv_dtype", "backend")}
    return Settings(**known, **{n: v for n, v in asked.items() if v is not None})


class _Progress:
    """A ``bench.timing.Watcher``: a bar on standard error, and a line for whatever is measured."""

    def __init__(self, suite: "Suite") -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed

        from dualflow.cli.console import remarks

        self._summary = suite.summary
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
        self.note(self._summary(row))
