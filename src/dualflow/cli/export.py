"""``dualflow export``: a model into a form that other programs read."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualflow.cli.convert import SOURCE_HELP
from dualflow.cli.units import file_size

if TYPE_CHECKING:
    from dualflow.checkpoint.convert import Progress, ReadModel

HELP = "write a model for other programs: its primary alone, or the whole for transformers"
EXAMPLES = """\
dualflow export models/smollm2-dual exports/smollm2 --format huggingface
dualflow export models/smollm2-dual exports/smollm2.gguf --format gguf --dtype q8_0
dualflow export models/smollm2-dual exports/smollm2-dual --format transformers
"""

FORMATS = ("huggingface", "gguf", "transformers")
DTYPES = ("auto", "float32", "bfloat16", "float16", "q8_0")
_KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "q8_0": "Q8_0"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("source", metavar="SRC", help=SOURCE_HELP)
    parser.add_argument("target", metavar="DST", help="folder or file to write; must be new")
    parser.add_argument(
        "--format", choices=FORMATS, required=True, dest="form",
        help="huggingface: a stock checkpoint of the primary alone, in its own family's names; "
        "gguf: the same as a file for llama.cpp; transformers: the whole model as a folder with "
        "its code, for AutoModelForCausalLM",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto",
        help="number format of the weights; q8_0 in GGUF alone (default: as stored)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Export; what was written goes to standard output, remarks to standard error."""
    from dualflow.checkpoint.convert import read_model, require_new
    from dualflow.cli.progress import progress_bars

    if args.dtype == "q8_0" and args.form != "gguf":
        raise ValueError(
            f"--dtype q8_0 belongs to --format gguf; expected one of {', '.join(DTYPES[:-1])}"
        )
    target = Path(args.target)
    require_new(target)
    with progress_bars() as progress:
        read = read_model(args.source, progress=progress)
        if read.model.quantised is not None:
            raise ValueError(
                f"{args.source} holds {read.model.quantised} weights, which other programs do not "
                "read; export the model they were made from"
            )
        _export(read, target, args.form, args.dtype, progress)
    _remark(read, args.form)
    print(f"{target}: {_what(read, args.form)}, {file_size(_bytes(target))}")
    return 0


def _export(read: "ReadModel", target: Path, form: str, dtype: Any, progress: "Progress") -> None:
    def show(done: int, total: int) -> None:
        progress("writing tensors", done, total)

    if form == "gguf":
        from dualflow.checkpoint.gguf.exporter import export_gguf

        kind: Any = _KINDS[_stored(read) if dtype == "auto" else dtype]
        export_gguf(read.model, target, companions=read.companions, kind=kind, progress=show)
    elif form == "huggingface":
        from dualflow.checkpoint.export import export_huggingface

        export_huggingface(
            read.model, target, primary_config=read.primary_config, companions=read.companions,
            dtype=dtype, progress=show,
        )  # fmt: skip
    else:
        from dualflow.integrations.transformers.export import export_transformers

        export_transformers(
            read.model, target, companions=read.companions, primary_config=read.primary_config,
            metrics=read.metrics, dtype=dtype,
        )  # fmt: skip


def _stored(read: "ReadModel") -> str:
    """Number format of the embedding, which stands for all matrices; float64 has no GGUF kind."""
    name = str(read.model.model.embed_tokens.weight.dtype).removeprefix("torch.")
    return name if name in _KINDS else "float32"


def _remark(read: "ReadModel", form: str) -> None:
    """Say what was left out, and what that costs."""
    config = read.model.config
    if form == "transformers" or config.variant == "standard":
        return
    losses = [
        f"{name} {loss:.4f}"
        for name, key in (("p, which this is,", "val_loss_p"), ("r", "val_loss"))
        if isinstance(loss := read.metrics.get(key), float)
    ]
    recorded = f" (validation loss: {', '.join(losses)})" if len(losses) == 2 else ""
    print(f"the primary alone was written, without the auxiliary flow{recorded}", file=sys.stderr)


def _what(read: "ReadModel", form: str) -> str:
    from dualflow.spec import parameter_counts

    counts = parameter_counts(read.model.config)
    if form == "transformers":
        return f"transformers folder, {counts.total:,} parameters"
    name = "GGUF file" if form == "gguf" else "Hugging Face folder"
    return f"{name} of the primary, {counts.primary:,} parameters"


def _bytes(target: Path) -> int:
    if target.is_file():
        return target.stat().st_size
    return sum(path.stat().st_size for path in target.iterdir())
