"""Rotary positions (Su et al. 2021) in the half-split layout of Llama checkpoints."""

import torch
from torch import Tensor


def rotary_table(positions_R: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every row's angles, each [R, H/2], float32 (float64 where the positions
    are float64).
    """
    dtype = torch.float64 if positions_R.dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, head_dim, 2, device=positions_R.device, dtype=dtype) / head_dim
    angles = positions_R.to(dtype)[:, None] * theta**-exponent
    return angles.cos(), angles.sin()


def rotate(x_RNH: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x[i], x[i + H/2]) of every head by its row's angle; same shape and dtype
    as ``x_RNH``.
    """
    cos, sin = (part[:, None, :].to(x_RNH.dtype) for part in table)
    first, second = x_RNH.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
