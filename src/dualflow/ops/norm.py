"""Normalisation over the last axis, computed in at least float32 and returned in the input's
dtype.
"""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · gain (Zhang & Sennrich 2019). Shape and dtype are those of the
    input.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


def make_norm(kind: str, size: int, eps: float) -> nn.Module:
    """``rmsnorm`` or ``layernorm`` (with bias) over ``size`` features."""
    return RMSNorm(size, eps) if kind == "rmsnorm" else nn.LayerNorm(size, eps)
