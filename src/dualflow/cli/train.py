"""``dualflow train``: train a model from a TOML file or a recipe, or continue a run."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualflow.train import RunConfig

HELP = "train a model from a configuration, or continue an interrupted run"
EXAMPLES = """\
dualflow train run.toml
dualflow train --recipe demo-dual --set train.steps=200 --set optimizer.lr=1e-3
dualflow train --resume runs/dual-seed0
dualflow train run.toml --dry-run
torchrun --nproc-per-node 2 -m dualflow train run.toml
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG.toml", help="the run; laid over --recipe if both given"
    )
    parser.add_argument("--recipe", metavar="NAME", help="begin from a named complete run")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="assignments",
        help="override one field, such as optimizer.lr=1e-3; repeatable",
    )
    parser.add_argument(
        "--runs",
        default=None,
        metavar="DIR",
        help="folder the run's folder goes into (default: runs)",
    )
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="continue the run in this folder, exactly as it would have gone on",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a run of the same name")
    parser.add_argument(
        "--print-config", action="store_true", help="print the whole configuration as TOML and stop"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print parameters, optimizer groups, tokens and FLOPs, and stop",
    )


def run(args: argparse.Namespace) -> int:
    """Train, or print what would be trained. Returns 0, or 130 / 143 where a signal stopped it."""
    config, runs_folder = _resolve(args)
    if args.print_config:
        from dualflow.config import to_toml

        print(to_toml(config), end="")
        return 0
    if args.dry_run:
        print(_plan(config))
        return 0
    from dualflow.train import train
    from dualflow.train.interrupt import TrainingInterrupted
    from dualflow.train.parallel import is_main_process

    resume = args.resume is not None
    try:
        result = train(config, runs_folder, resume=resume, overwrite=args.overwrite)
    except TrainingInterrupted as stop:
        if is_main_process():
            print(f"dualflow train: {stop}", file=sys.stderr)
        return stop.exit_code
    if is_main_process():
        print(_summary(result, Path(runs_folder) / config.name))
    return 0


def _resolve(args: argparse.Namespace) -> tuple["RunConfig", Path]:
    """The run that is asked for, overrides applied, and the folder its folder lies in."""
    from dualflow.train.config import read_run_config, with_assignments

    if args.resume is not None:
        if args.config or args.recipe or args.runs or args.overwrite:
            raise ValueError(
                "--resume takes everything from the run's folder; "
                "leave out CONFIG, --recipe, --runs and --overwrite"
            )
        folder = _run_folder(args.resume)
        config = dataclasses.replace(read_run_config(folder / "config.json"), name=folder.name)
        return with_assignments(config, args.assignments), folder.parent
    if not args.config and not args.recipe:
        raise ValueError("nothing to train: give CONFIG.toml, --recipe NAME or --resume RUN")
    config = None
    if args.recipe:
        from dualflow.recipes import recipe

        config = recipe(args.recipe)
    runs = Path(args.runs or "runs")
    if args.config:
        return read_run_config(args.config, config, args.assignments), runs
    assert config is not None
    return with_assignments(config, args.assignments), runs


def _run_folder(named: str) -> Path:
    """The folder of the run ``named``: a path, or a name under runs/."""
    for folder in (Path(named), Path("runs") / named):
        if (folder / "config.json").is_file():
            return folder.resolve() if folder.name in ("", ".", "..") else folder
    raise ValueError(f"there is no run in {named} (no {Path(named) / 'config.json'})")


def _plan(config: "RunConfig") -> str:
    """What training ``config`` means: sizes, optimizer groups, tokens and FLOPs. Reads no data."""
    from dualflow.model import build_model
    from dualflow.plan.costs import train_flops_per_token
    from dualflow.spec import parameter_counts
    from dualflow.train.optimizers import Optimizers

    counts, trainable = parameter_counts(config.model), config.train.trainable
    context = config.data.sequence_length
    tokens = config.train.steps * config.train.batch_size * context
    per_token = train_flops_per_token(config.model, context, trainable)
    flops = f"training FLOPs: {per_token * tokens:.3g} ({per_token:,.0f} per token"
    model = build_model(config.model, device="meta")
    if trainable == "aux":
        model.freeze_primary()
        whole = train_flops_per_token(config.model, context)
        flops += f", {per_token / whole:.0%} of training everything"
    groups = Optimizers(model, config.optimizer)
    trained = sum(parameter.numel() for parameter in groups.parameters.values())
    begun = f", begun from {config.initial_model}" if config.initial_model else ""
    return "\n".join(
        (
            f"{config.name}: {config.model.variant}, seed {config.seed}{begun}",
            f"parameters: {counts.total:,} (primary {counts.primary:,}, auxiliary {counts.aux:,})",
            f"trained: {trained:,} ({'the auxiliary alone' if trainable == 'aux' else 'all'})",
            f"tokens: {tokens:,} = {config.train.steps:,} steps "
            f"x {config.train.batch_size} sequences x {context}",
            f"{flops})",
            "optimizer groups:",
            groups.table(),
        )
    )


def _summary(result: dict[str, Any], folder: Path) -> str:
    shown = _losses(result, "")
    if before := _losses(result, "_initial"):
        shown += f" (before training {before})"
    trained, per_token = result.get("params_trainable"), result["train_flops_per_token"]
    cost = f"{trained:,} parameters trained at {per_token:.3g} FLOPs per token; " if trained else ""
    return (
        f"{result['name']}: {result['steps']} steps, {result['tokens']:,} tokens, "
        f"{result['train_seconds']:.0f} s; {cost}validation loss {shown or 'not measured'}; "
        f"model in {folder / 'model'}"
    )


def _losses(result: dict[str, Any], suffix: str) -> str:
    names = {"r": "val_loss", "p": "val_loss_p", "q": "val_loss_q"}
    losses = {name: result.get(f"{key}{suffix}") for name, key in names.items()}
    return ", ".join(f"{name} {value:.4f}" for name, value in losses.items() if value is not None)
