"""``dualflow demo``: train a standard and a Dual-Flow model, compare them, generate text."""

import argparse
from pathlib import Path

HELP = "train a standard and a Dual-Flow model on the same tokens, compare them and generate text"

EXAMPLES = """\
dualflow demo
dualflow demo --seed 3
dualflow demo --runs runs/short --set train.steps=100 --set train.compile=off
"""

PROMPT = "def main(argv=None):\n"


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
    from dualflow.train import train

    folder, say = Path(args.runs), remarks()
    runs: list[str] = []
    for variant in ("standard", "dual"):
        config = configuration.override(demo(variant, args.seed), args.assignments)
        say.rule(f"training {config.name}")
        train(config, folder, resume=False if args.overwrite else "auto", overwrite=args.overwrite)
        runs.append(str(folder / config.name))
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
