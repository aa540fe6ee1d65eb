"""``dualflow convert``: a model in another format into a model folder."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from dualflow.cli.units import file_size

if TYPE_CHECKING:
    from dualflow.model import CausalLM

HELP = "import a GGUF file or Hugging Face folder, or change a model's number format"
EXAMPLES = """\
dualflow convert SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2 --dtype bfloat16
dualflow convert downloads/Qwen3-0.6B models/qwen3
dualflow convert models/smollm2-dual models/smollm2-dual-int8 --dtype int8
"""

DTYPES = ("auto", "float32", "bfloat16", "int8", "int4")

SOURCE_HELP = (
    "a GGUF file, a Hugging Face folder (safetensors), a model folder or a run folder; "
    "docs/models.md lists the families"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("source", metavar="SRC", help=SOURCE_HELP)
    parser.add_argument("target", metavar="DST", help="the model folder to write; must be new")
    add_dtype_option(parser)


def add_dtype_option(parser: argparse.ArgumentParser) -> None:
    """Declare ``--dtype`` of the verbs that write a model folder."""
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto",
        help="number format of the weights (default: as stored; quantised GGUF becomes float32)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Convert; what was written goes to standard output, progress to standard error."""
    from dualflow.checkpoint.convert import convert
    from dualflow.cli.progress import progress_bars

    with progress_bars() as progress:
        model = convert(args.source, args.target, dtype=args.dtype, progress=progress)
    print(summary(model, Path(args.target)))
    return 0


def summary(model: "CausalLM", target: Path) -> str:
    """What lies in ``target`` now, in one line."""
    from dualflow.spec import parameter_counts

    counts = parameter_counts(model.config)
    size = sum(path.stat().st_size for path in target.iterdir())
    added = f" + {counts.aux:,} of the auxiliary flow" if counts.aux else ""
    weights = model.quantised or str(model.model.norm.weight.dtype).removeprefix("torch.")
    return (
        f"{target}: {model.config.variant} model, {counts.primary:,} parameters{added}, "
        f"{weights}, {file_size(size)}"
    )
