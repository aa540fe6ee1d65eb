"""``dualflow eval --tasks``: tasks of lm-eval on a trained model."""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualflow.extras import require_extra

if TYPE_CHECKING:
    from dualflow.evaluate.tables import Table

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
"""Set to 1 unless the user has set them: nothing is downloaded behind anyone's back."""


def add_task_options(parser: argparse.ArgumentParser) -> None:
    """Declare ``--tasks`` and what belongs to it."""
    group = parser.add_argument_group("tasks of lm-eval in place of the loss")
    group.add_argument(
        "--tasks", metavar="NAME[,NAME]",
        help="tasks or groups of lm-eval: pip install 'dualflow[eval]'. Their data must be here "
        "already, unless HF_HUB_OFFLINE=0 and HF_DATASETS_OFFLINE=0 allow to download it",
    )  # fmt: skip
    group.add_argument("--include-path", metavar="DIR", help="folder with tasks of your own (YAML)")
    group.add_argument(
        "--limit", type=int, metavar="N", help="the first N documents of each task (default: all)"
    )
    group.add_argument(
        "--num-fewshot", type=int, metavar="K",
        help="examples before each question (default: as the task has it)",
    )  # fmt: skip
    group.add_argument(
        "--aux", metavar="on|off|exact|threshold=T",
        help="when a dual model's auxiliary flow runs; off scores the primary alone (default: on)",
    )  # fmt: skip
    group.add_argument(
        "--output", metavar="FILE", help="also write the results to FILE as JSON; must be new"
    )


def check_task_options(args: argparse.Namespace) -> None:
    """Raise ``ValueError`` where options of the loss and of tasks are mixed, or out of range."""
    of_tasks = ("include_path", "limit", "num_fewshot", "aux", "output")
    of_loss = ("data", "sequence_length")
    wrong = of_loss if args.tasks is not None else of_tasks
    for name in wrong:
        if getattr(args, name) is not None:
            other = "the loss, not to --tasks" if wrong is of_loss else "--tasks, which is missing"
            raise ValueError(f"--{name.replace('_', '-')} belongs to {other}")
    for name, least in (("limit", 1), ("num_fewshot", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; expected {least} or more")
    if args.output is not None and Path(args.output).exists():
        raise ValueError(f"--output {args.output} exists already; name a new file")


def run_tasks(args: argparse.Namespace) -> int:
    """Print the results of every task to standard output."""
    for name in OFFLINE:
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TQDM_DISABLE", "1")  # there are bars of ours
    require_extra("lm_eval", "eval", "dualflow eval --tasks")
    record = _evaluate(args)
    if args.output is not None:
        from dualflow.checkpoint.atomic import write_atomic

        text = json.dumps(record, indent=2) + "\n"
        write_atomic(Path(args.output), lambda path: path.write_text(text, encoding="utf-8"))
    if args.json:
        print(json.dumps(record))
    else:
        from dualflow.cli.console import output
        from dualflow.evaluate.tables import to_rich

        output().print(to_rich(_table(record)))
    return 0


def _evaluate(args: argparse.Namespace) -> dict[str, Any]:
    from importlib.metadata import version

    from dualflow.cli.progress import progress_bars
    from dualflow.cli.serving import warnings_as_lines
    from dualflow.integrations.lm_eval import DualFlowLM
    from dualflow.integrations.lm_eval_tasks import evaluate_tasks
    from dualflow.model.device import pick_device

    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    if not names:
        raise ValueError("--tasks names none; expected one or several with commas between")
    settings = {} if args.weights is None else {"weights": args.weights}
    with warnings_as_lines(), progress_bars() as progress:
        model = DualFlowLM(
            args.model, aux=args.aux or "on", device=str(pick_device(args.device)),
            progress=progress, **settings,
        )  # fmt: skip
        rows = evaluate_tasks(
            model, names, include_path=args.include_path, limit=args.limit,
            num_fewshot=args.num_fewshot,
        )  # fmt: skip
    return {
        "model": args.model, "aux": args.aux or "on", "limit": args.limit,
        "lm_eval": version("lm_eval"), "results": rows,
    }  # fmt: skip


def _table(record: dict[str, Any]) -> "Table":
    from dualflow.evaluate.tables import NOTHING, Table

    rows = []
    for row in record["results"]:
        better = {True: "higher", False: "lower", None: NOTHING}[row["higher_is_better"]]
        error = NOTHING if row["stderr"] is None else f"± {row['stderr']:.4f}"
        metric = row["metric"] + ("" if row["filter"] == "none" else f" ({row['filter']})")
        number = NOTHING if row["samples"] is None else f"{row['samples']:,}"
        shots = NOTHING if row["num_fewshot"] is None else str(row["num_fewshot"])
        rows.append((row["task"], metric, f"{row['value']:.4f}", error, better, shots, number))
    limited = "" if record["limit"] is None else f", the first {record['limit']:,} documents each"
    return Table(
        title=f"Tasks of lm-eval {record['lm_eval']}, auxiliary {record['aux']}{limited}",
        columns=("task", "metric", "value", "standard error", "better is", "few-shot", "documents"),
        rows=tuple(rows),
    )
