"""What a model costs, by formula: FLOPs and KV bytes per token, bytes of weights. Nothing here
imports torch.
"""

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
from dualflow.plan.weights import WeightBytes, WeightFormat, matrix_bytes, weight_bytes

__all__ = [
    "FlopBreakdown",
    "FlowFlops",
    "WeightBytes",
    "WeightFormat",
    "decode_flops",
    "decode_flops_per_token",
    "kv_bytes_per_token",
    "matrix_bytes",
    "prefill_flops",
    "prefill_flops_per_token",
    "train_flops",
    "train_flops_per_token",
    "weight_bytes",
]
