"""What a model costs, by formula: FLOPs and KV bytes per token. Nothing here imports torch."""

from dualflow.plan.costs import (
    FlopBreakdown,
    FlowFlops,
    decode_flops,
    decode_flops_per_token,
    kv_bytes_per_token,
    prefill_flops,
    prefill_flops_per_token,
    train_flops,
    train_flops_per_token,
)

__all__ = [
    "FlopBreakdown",
    "FlowFlops",
    "decode_flops",
    "decode_flops_per_token",
    "kv_bytes_per_token",
    "prefill_flops",
    "prefill_flops_per_token",
    "train_flops",
    "train_flops_per_token",
]
