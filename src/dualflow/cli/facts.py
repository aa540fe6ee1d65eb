"""What is known of a model without running it, as a flat record for people and machines."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualflow.checkpoint.describe import Description, Stored
    from dualflow.plan.weights import WeightFormat
    from dualflow.spec import ModelConfig

COUNTED_CONTEXT = 1024
"""Keys that a generated token attends where FLOPs are compared; fewer in shorter models."""

_CACHE_FORMATS = {"F64": ("float64", 8)} | dict.fromkeys(
    ("BF16", "F16", "I8", "U8"), ("bfloat16", 2)
)
"""The engine's cache by the format of the matrices, and bytes of a number; else float32."""


@dataclass(frozen=True)
class Added:
    """What the auxiliary flows add to their primary alone.

    bytes:         of their weights.
    decode_ratio:  FLOPs of a generated token of ``context`` keys over those of the primary alone.
    """

    parameters: int
    parameters_percent: float
    bytes: int
    decode_ratio: float
    context: int


def added(config: "ModelConfig", weights: "WeightFormat") -> Added:
    """By formula, for weights held in one format."""
    from dualflow.plan.costs import decode_flops_per_token
    from dualflow.plan.weights import weight_bytes
    from dualflow.spec import parameter_counts, standard_twin

    counts, context = parameter_counts(config), min(COUNTED_CONTEXT, config.max_position)
    alone = decode_flops_per_token(standard_twin(config), context)
    return Added(
        parameters=counts.aux,
        parameters_percent=100 * counts.aux / counts.primary,
        bytes=weight_bytes(config, weights).aux,
        decode_ratio=decode_flops_per_token(config, context) / alone,
        context=context,
    )


def facts(found: "Description") -> dict[str, Any]:
    """Everything ``dualflow info`` says, in its order, by name; values as JSON has them."""
    from dualflow.config import to_dict
    from dualflow.spec import parameter_counts

    config = found.config
    counts = parameter_counts(config)
    table = to_dict(config)
    aux = found.aux.bytes
    return {
        "path": str(found.path),
        "kind": found.kind.value,
        "family": found.family,
        "variant": config.variant,
        "parameters": {"primary": counts.primary, "aux": counts.aux, "total": counts.total},
        "bytes": {
            "primary": found.primary.bytes, "aux": aux, "total": found.primary.bytes + aux,
        },
        "formats": {"primary": dict(found.primary.formats), "aux": dict(found.aux.formats)},
        "quantised": found.quantised,
        "config": table,
        "context_length": config.max_position,
        "kv_cache": _cache(found),
        "tokenizer": found.has_tokenizer,
        "chat_template": found.has_chat_template,
        "losses": {
            name: found.metrics.get(key)
            for name, key in (("r", "val_loss"), ("p", "val_loss_p"), ("q", "val_loss_q"))
        },
        "auxiliary_adds": _auxiliary(found),
    }  # fmt: skip


def _cache(found: "Description") -> dict[str, Any]:
    """Bytes of the KV cache in the number format that the engine takes by default."""
    from dualflow.plan.costs import kv_bytes_per_token

    kind, size = _CACHE_FORMATS.get(main_format(found.primary) or "", ("float32", 4))
    per_token = kv_bytes_per_token(found.config, size)
    return {
        "format": kind,
        "bytes_per_token": per_token,
        "bytes_at_context_length": per_token * found.config.max_position,
    }


def _auxiliary(found: "Description") -> dict[str, Any] | None:
    if found.config.variant == "standard":
        return None
    what = added(found.config, "float32")
    return {
        "parameters_percent": what.parameters_percent,
        "bytes": found.aux.bytes,
        "decode_flops_ratio": what.decode_ratio,
        "decode_flops_context": what.context,
        "prefill_flops_ratio": 1.0,
        "kv_cache_bytes": 0,
    }


def main_format(stored: "Stored") -> str | None:
    """The format most bytes are in; None where there are none."""
    formats = stored.formats
    return max(formats, key=lambda name: formats[name]) if formats else None
