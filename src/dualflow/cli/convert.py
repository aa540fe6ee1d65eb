"""``dualflow convert``: a model in another format into a model folder."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualflow.checkpoint.convert import Progress
    from dualflow.model import CausalLM

HELP = "import a GGUF model, change a model's number format, or add an auxiliary flow"
EXAMPLES = """\
dualflow convert SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2 --dtype bfloat16
dualflow convert SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2-dual --add-aux
dualflow convert models/smollm2-dual models/smollm2-dual-int8 --dtype int8
"""

DTYPES = ("auto", "float32", "bfloat16", "int8", "int4")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "source", metavar="SRC", help="a GGUF file (Llama family), a model folder or a run folder"
    )
    parser.add_argument("target", metavar="DST", help="the model folder to write; must be new")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto",
        help="number format of the weights (default: as stored; quantised GGUF becomes float32)",
    )  # fmt: skip
    parser.add_argument(
        "--add-aux", action="store_true",
        help="add an auxiliary flow that starts as a copy of the primary: the model answers as "
        "before until the flow is trained",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Convert; what was written goes to standard output, progress to standard error."""
    from dualflow.checkpoint.convert import convert

    with _progress() as progress:
        model = convert(
            args.source, args.target, dtype=args.dtype, add_aux=args.add_aux, progress=progress
        )
    print(_summary(model, Path(args.target)))
    if args.add_aux:
        print(
            "the auxiliary flow is not trained yet: until it is, it costs time at decode and "
            "changes no answer; --aux off leaves it out",
            file=sys.stderr,
        )
    return 0


def _summary(model: "CausalLM", target: Path) -> str:
    from dualflow.spec import parameter_counts

    counts = parameter_counts(model.config)
    size = sum(path.stat().st_size for path in target.iterdir())
    added = f" + {counts.aux:,} of the auxiliary flow" if counts.aux else ""
    weights = model.quantised or str(model.model.norm.weight.dtype).removeprefix("torch.")
    return (
        f"{target}: {model.config.variant} model, {counts.primary:,} parameters{added}, "
        f"{weights}, {size / 1e6:,.1f} MB"
    )


@contextmanager
def _progress() -> "Iterator[Progress]":
    """A progress bar per stage on standard error; nothing where that is not a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from dualflow.cli.console import remarks

    console = remarks()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    tasks: dict[str, Any] = {}

    def show(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            for finished in tasks.values():
                bars.stop_task(finished)
            tasks[stage] = bars.add_task(stage, total=None)
        bars.update(tasks[stage], completed=done, total=total or None)

    with bars:
        yield show
