"""``dualflow demo``: train a standard and a Dual-Flow model, compare them, generate text."""

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from dualflow.train import RunConfig
    from dualflow.train.subprocesses import TrainingProcess

HELP = "train a standard and a Dual-Flow model on the same tokens, compare them and generate text"

EXAMPLES = """\
dualflow demo
dualflow demo --seed 3 --runs runs/demo-seed3
dualflow demo --runs runs/short --set train.steps=100 --set train.compile=off
"""

PROMPT = "def main(argv=None):\n"
_GLANCE_SECONDS = 0.3


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument(
        "--runs", default="runs/demo", metavar="DIR", help="where all goes (default: runs/demo)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="assignments",
        help="override one field of both runs, such as train.steps=100; repeatable",
    )
    parser.add_argument("--overwrite", action="store_true", help="train again what is there")


def run(args: argparse.Namespace) -> int:
    """Train both models (or finish what an earlier demo began), compare, and generate a text."""
    from dualflow import config as configuration
    from dualflow.cli.console import remarks
    from dualflow.cli.main import main
    from dualflow.recipes import demo
    from dualflow.train.interrupt import TrainingInterrupted

    folder, say = Path(args.runs), remarks()
    configs = [
        configuration.override(demo(variant, args.seed), args.assignments)
        for variant in ("standard", "dual")
    ]
    say.rule("training both models side by side, one core each")
    try:
        _train_side_by_side(configs, folder, args.overwrite, say)
    except TrainingInterrupted as stop:
        say.print("stopped and saved; the same command goes on from there", markup=False)
        return stop.exit_code
    runs = [str(folder / config.name) for config in configs]
    say.rule("comparison")
    if code := main(["compare", *runs, "--baseline", "standard", "--out", str(folder)]):
        return code
    say.rule("a text by the Dual-Flow model")
    words = ["generate", runs[-1], "--prompt", PROMPT, "--echo", "--max-tokens", "120"]
    if code := main([*words, "--seed", "0"]):
        return code
    say.print(
        f"\nreport: {folder / 'report.html'}\n"
        f"more text: dualflow generate {runs[-1]} --prompt 'class '",
        soft_wrap=True,
        markup=False,
    )
    return 0


def _train_side_by_side(
    configs: list["RunConfig"], folder: Path, overwrite: bool, say: "Console"
) -> None:
    """Train in one process per model. A signal makes them all save and stop."""
    import signal

    from dualflow.train.interrupt import TrainingInterrupted
    from dualflow.train.subprocesses import TrainingProcess

    def stop(number: int, _: object) -> None:
        raise TrainingInterrupted("stopped", number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    processes: list[TrainingProcess] = []
    try:
        for config in configs:
            processes.append(
                TrainingProcess(
                    config,
                    folder,
                    resume=False if overwrite else "auto",
                    overwrite=overwrite,
                    progress="none" if say.is_terminal else "plain",
                    apart=True,
                )
            )
        _watch(processes, configs, folder, say)
        for process in processes:
            process.result()
    finally:
        # Reached with running processes only where something went wrong: a signal, or another run.
        for process in processes:
            process.send_signal(signal.SIGINT)
        while any(process.running for process in processes):
            time.sleep(_GLANCE_SECONDS)
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(
    processes: list["TrainingProcess"], configs: list["RunConfig"], folder: Path, say: "Console"
) -> None:
    """Draw how far the runs are until the last has ended, or one has failed."""
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(),
        TextColumn("{task.fields[figures]}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=say, disable=not say.is_terminal) as bars:
        tasks = [
            bars.add_task(config.name, total=config.train.steps, figures="preparing")
            for config in configs
        ]
        while any(process.running for process in processes):
            time.sleep(_GLANCE_SECONDS)
            for config, task in zip(configs, tasks, strict=True):
                if newest := _newest_record(folder / config.name / "metrics.jsonl"):
                    figures = (
                        f"loss {newest['loss']:.3f}, {newest['tokens_per_second']:,.0f} tokens/s"
                    )
                    bars.update(task, completed=newest["step"], figures=figures)
            for process in processes:
                if not process.running:
                    process.result()


def _newest_record(metrics: Path) -> dict[str, Any] | None:
    """The last whole training record that a run has written."""
    if not metrics.is_file():
        return None
    for line in reversed(metrics.read_text(encoding="utf-8").splitlines()):
        try:
            record = json.loads(line)
        except ValueError:  # still being written
            continue
        if record.get("kind") == "train":
            return record
    return None
