"""``dualflow info``: what a model is and what it costs, from its headers alone."""

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dualflow.cli.convert import SOURCE_HELP
from dualflow.cli.units import file_size

if TYPE_CHECKING:
    from rich.table import Table

HELP = "say what a model is: sizes, parameters by owner, bytes, cache, what its auxiliary adds"
EXAMPLES = """\
dualflow info models/smollm2-dual
dualflow info SmolLM2-135M-Instruct.Q4_1.gguf
dualflow info runs/demo/dual-seed0 --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("model", metavar="PATH", help=SOURCE_HELP)
    parser.add_argument("--json", action="store_true", help="write one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Print the facts to standard output. No weights are read."""
    from dualflow.checkpoint.describe import describe
    from dualflow.cli.console import output
    from dualflow.cli.facts import facts

    record = facts(describe(args.model))
    if args.json:
        print(json.dumps(record, indent=2))
    else:
        output().print(_table(record))
    return 0


def _table(record: dict[str, Any]) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # Text, as what a file says of itself may look like markup.
    title = Text(record["path"], style="bold")
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in lines(record):
        table.add_row(name, Text(text))
    return table


def lines(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What is shown of ``facts``: a name and a text each."""
    config = record["config"]
    family = f", family {record['family']}" if record["family"] else ""
    yield "model", f"{record['variant']} ({record['kind']}{family})"
    yield "shape", _shape(config)
    yield "switches", _switches(config)
    yield "context", _context(config)
    if record["auxiliary_adds"]:
        yield "auxiliary", _flows(config)
    yield from _sizes(record)
    cache = record["kv_cache"]
    yield (
        "KV cache",
        (
            f"{cache['bytes_per_token']:,} bytes a token in {cache['format']}, "
            f"{file_size(cache['bytes_at_context_length'])} for {record['context_length']:,} tokens"
        ),
    )
    yield (
        "text",
        ", ".join(
            f"{'has a' if record[key] else 'no'} {key.replace('_', ' ')}"
            for key in ("tokenizer", "chat_template")
        ),
    )
    losses = {name: value for name, value in record["losses"].items() if value is not None}
    shown = ", ".join(f"{name} {value:.4f}" for name, value in losses.items())
    yield "validation loss", shown or "not recorded"
    if record["auxiliary_adds"]:
        yield "the auxiliary adds", _adds(record["auxiliary_adds"])


def _shape(config: dict[str, Any]) -> str:
    heads, kv_heads = config["num_heads"], config["num_kv_heads"] or config["num_heads"]
    head_dim = config["head_dim"] or config["hidden_size"] // heads
    real = config["real_vocab_size"]
    padding = f" ({real:,} of them real)" if real else ""
    return (
        f"{config['num_layers']} layers, width {config['hidden_size']:,}, {heads} heads of "
        f"{head_dim} ({kv_heads} for keys and values), MLP {config['intermediate_size']:,} "
        f"({config['mlp']}), vocabulary {config['vocab_size']:,}{padding}"
    )


def _switches(config: dict[str, Any]) -> str:
    norm = f"{config['norm']} {config['norm_placement']}"
    switches = [norm + (" (1 + gain)" if config["norm_offset"] else "")]
    switches.append("tied head" if config["tie_embeddings"] else "head of its own")
    if config["qk_norm"]:
        switches.append(f"QK-norm over each {config['qk_norm_span']}")
    named = {
        "attention_bias": "biases on q, k, v", "attention_output_bias": "bias on o",
        "mlp_bias": "biases in the MLP", "scale_embeddings": "scaled embeddings",
    }  # fmt: skip
    switches += [text for key, text in named.items() if config[key]]
    for key in ("attention_softcap", "final_softcap", "attention_scale"):
        if config[key] is not None:
            switches.append(f"{key.replace('_', ' ')} {config[key]:g}")
    return ", ".join(switches)


def _context(config: dict[str, Any]) -> str:
    parts = [f"{config['max_position']:,} tokens"]
    if config["position"] == "learned":
        parts.append("learned positions")
    else:
        parts.append(f"rotary base {config['rope_theta']:,.0f}")
    if scaling := config["rope_scaling"]:
        before = scaling["original_max_position"]
        since = f" from {before:,}" if before else ""
        parts.append(f"{scaling['kind']} scaling × {scaling['factor']:g}{since}")
    if config["sliding_window"]:
        layers = config["sliding_layers"]
        where = "every layer" if layers is None else f"{len(layers)} of {config['num_layers']}"
        parts.append(f"window of {config['sliding_window']:,} in {where}")
        if config["local_rope_theta"]:
            parts.append(f"rotary base {config['local_rope_theta']:,.0f} there")
    return ", ".join(parts)


def _flows(config: dict[str, Any]) -> str:
    if config["variant"] == "dual":
        from dualflow.config import from_dict
        from dualflow.spec import ModelConfig

        flows = from_dict(ModelConfig, config).flows
        assert flows is not None
        number = f"{flows.num_flows} flow{'s' if flows.num_flows > 1 else ''}"
        couplings = ", ".join(flows.couplings) or "none"
        owned = ", ".join(flows.owns)
        lora = f"LoRA of rank {flows.lora_rank} on {owned}" if flows.lora_rank else f"owns {owned}"
        return (
            f"{number}, embedding {flows.embedding}, couplings {couplings}, "
            f"{lora if owned else 'owns no matrix'}, norms {flows.flow_norms}; "
            f"readout {config['readout']['kind']}"
        )
    return f"that of {config['variant']}"


def _sizes(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for owner in ("primary", "aux"):
        if record["parameters"][owner]:
            formats = record["formats"][owner]
            shown = ", ".join(sorted(formats, key=lambda name: -formats[name]))
            yield (
                "auxiliary's own" if owner == "aux" else "primary",
                f"{record['parameters'][owner]:,} parameters, "
                f"{file_size(record['bytes'][owner])} on disk ({shown})",
            )


def _adds(what: dict[str, Any]) -> str:
    return (
        f"{what['parameters_percent']:.1f} % parameters, {file_size(what['bytes'])}, "
        f"{what['decode_flops_ratio']:.2f} times the FLOPs of a generated token "
        f"(at {what['decode_flops_context']:,} tokens), nothing to prefill, "
        "0 bytes to the KV cache"
    )
