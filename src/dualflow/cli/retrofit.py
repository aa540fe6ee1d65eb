"""``dualflow retrofit``: give a model auxiliary flows that change nothing until trained."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualflow.cli.convert import SOURCE_HELP, add_dtype_option
from dualflow.cli.units import file_size

if TYPE_CHECKING:
    from dualflow.cli.facts import Added
    from dualflow.model import CausalLM
    from dualflow.spec import AuxConfig

HELP = "add an auxiliary flow to a model, which predicts the same until that flow is trained"
EXAMPLES = """\
dualflow retrofit models/smollm2 models/smollm2-dual
dualflow retrofit SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2-dual --lora-rank 8
dualflow retrofit downloads/Qwen3-0.6B models/qwen3-dual --owns o_proj --readout learned
"""

OWNED = ("q_proj", "o_proj", "mlp", "lm_head")
READOUTS = ("mixture", "aux_only", "learned")
LORA_DEFAULT = ("q_proj", "o_proj", "mlp")
"""What ``--lora-rank`` adapts where ``--owns`` does not say."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("source", metavar="SRC", help=SOURCE_HELP)
    parser.add_argument("target", metavar="DST", help="the model folder to write; must be new")
    parser.add_argument(
        "--owns", type=_owned, default=(), metavar="NAMES",
        help="matrices of the flow's own in place of the shared ones, with commas between: "
        f"{', '.join(OWNED)} (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--lora-rank", type=int, default=None, metavar="R",
        help="own a LoRA of rank R on the shared matrices in place of whole ones (without --owns: "
        f"on {', '.join(LORA_DEFAULT)})",
    )  # fmt: skip
    parser.add_argument(
        "--flows", type=int, default=1, metavar="N", help="auxiliary flows (default: 1)"
    )
    parser.add_argument(
        "--readout", choices=READOUTS, default="mixture",
        help="how the flows' distributions become the model's. mixture: the paper's; aux_only: the "
        "auxiliary's alone; learned: a mixture whose weight is trained (default: mixture)",
    )  # fmt: skip
    parser.add_argument(
        "--norms", choices=("shared", "separate"), default="shared",
        help="whether the flow has norm gains of its own (default: shared)",
    )  # fmt: skip
    add_dtype_option(parser)


def run(args: argparse.Namespace) -> int:
    """Retrofit; what was written and added goes to standard output, progress to standard error."""
    from dualflow.checkpoint.convert import retrofit
    from dualflow.cli.convert import summary
    from dualflow.cli.facts import added
    from dualflow.cli.progress import progress_bars
    from dualflow.spec import ReadoutConfig

    aux = aux_config(args)
    with progress_bars() as progress:
        model = retrofit(
            args.source, args.target, aux=aux, readout=ReadoutConfig(kind=args.readout),
            dtype=args.dtype, progress=progress,
        )  # fmt: skip
    target = Path(args.target)
    print(summary(model, target))
    print(_added_lines(added(model.config, _weights(model))))
    print(_next(model, target))
    return 0


def aux_config(args: argparse.Namespace) -> "AuxConfig":
    """The flows that are asked for. Raises ``ValueError`` naming the option."""
    from dualflow.spec import AuxConfig

    for option, value in (("--flows", args.flows), ("--lora-rank", args.lora_rank)):
        if value is not None and value < 1:
            raise ValueError(f"{option} is {value}; expected 1 or more")
    owns = args.owns or (LORA_DEFAULT if args.lora_rank else ())
    return AuxConfig(
        num_flows=args.flows, flow_norms=args.norms, owns=owns, lora_rank=args.lora_rank or 0
    )


def _owned(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in OWNED]
    if unknown or not names or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(
            f"{text!r} does not name different ones of {', '.join(OWNED)}"
        )
    return names


def _weights(model: "CausalLM") -> Any:
    return model.quantised or str(model.model.embed_tokens.weight.dtype).removeprefix("torch.")


def _added_lines(what: "Added") -> str:
    return (
        f"the auxiliary adds {what.parameters:,} parameters ({what.parameters_percent:.1f} %), "
        f"{file_size(what.bytes)}, {what.decode_ratio:.2f} times the FLOPs of a generated token "
        f"({what.context:,} tokens of context), nothing to prefill and 0 bytes to the KV cache"
    )


def _next(model: "CausalLM", target: Path) -> str:
    if model.quantised is not None:
        return (
            "quantised matrices are not trained: train the float model, then "
            "`dualflow convert` it to this format"
        )
    from dualflow.recipes import retrofit

    settings = [f"initial_model={target}", "data.source=YOUR_TEXT.txt"]
    longest = model.config.max_position
    if longest < retrofit().data.sequence_length:
        settings.append(f"data.sequence_length={longest}")
    options = " ".join(f"--set {shlex.quote(setting)}" for setting in settings)
    alone = "; --aux off leaves it out" if model.has_primary_readout else ""
    return (
        "the auxiliary flow is not trained yet: until it is, the model predicts the same up to "
        f"rounding and costs time at decode{alone}; to train it alone, on your text:\n"
        f"  dualflow train --recipe retrofit {options}"
    )
