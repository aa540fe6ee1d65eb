"""``dualflow demo``: train a standard and a Dual-Flow model on the same tokens, compare, generate."""

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
    parser.add_argument("--overwrite", action="store_true", help="train again what is there already")


def run(args: argparse.Namespace) -> int:
    """Train both models (or finish what an earlier demo began), compare, and generate a text."""
    from dualflow import config as configuration
    from dualflow.cli import compare, generate
    from dualflow.cli.console import remarks
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
    _verb(compare, [*runs, "--baseline", "standard", "--out", str(folder)])
    say.rule("a text by the Dual-Flow model")
    _verb(generate, [runs[-1], "--prompt", PROMPT, "--echo", "--max-tokens", "120", "--seed", "0"])
    say.print(
        f"\nreport: {folder / 'report.html'}\n"
        f"more text: dualflow generate {runs[-1]} --prompt 'class '",
        soft_wrap=True,
        markup=False,
    )
    return 0


def _verb(module, arguments: list[str]) -> None:  # noqa: ANN001
    """Run another verb as its command line would."""
    parser = argparse.ArgumentParser()
    module.configure(parser)
    module.run(parser.parse_args(arguments))
