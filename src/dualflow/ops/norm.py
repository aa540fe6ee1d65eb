"""Normalisation over the last axis, computed in at least float32 and returned in the input's
dtype.
"""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · gain (Zhang & Sennrich 2019). Shape and dtype are those of the
    input. The gain is the weight, or 1 + weight where the norm has an ``offset`` (Gemma).
    """

    def __init__(self, size: int, eps: float, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if offset else torch.ones(size))
        self.eps, self.offset = eps, offset

    @property
    def gain(self) -> Tensor:
        """What the normalised input is multiplied by, in at least float32."""
        weight = self.weight if self.weight.dtype == torch.float64 else self.weight.float()
        return 1.0 + weight if self.offset else weight

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.gain).to(x.dtype)


def make_norm(kind: str, size: int, eps: float, offset: bool = False) -> nn.Module:
    """``rmsnorm`` or ``layernorm`` (with bias) over ``size`` features."""
    return RMSNorm(size, eps, offset) if kind == "rmsnorm" else nn.LayerNorm(size, eps)
