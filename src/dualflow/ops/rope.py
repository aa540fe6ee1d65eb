"""Rotary positions (Su et al. 2021) in the half-split layout of Llama checkpoints."""

import math

import torch
from torch import Tensor

from dualflow.spec import RopeScaling


def rotary_table(
    positions_R: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every row's angles, each [R, H/2], float32 (float64 where the positions
    are float64).
    """
    dtype = torch.float64 if positions_R.dtype == torch.float64 else torch.float32
    index = torch.arange(0, head_dim, 2, device=positions_R.device, dtype=dtype)
    frequencies = theta ** -(index / head_dim)
    factor = 1.0
    if scaling is not None:
        frequencies = frequencies * _stretch(frequencies, head_dim, theta, scaling)
        factor = attention_factor(scaling)
    angles = positions_R.to(dtype)[:, None] * frequencies
    return angles.cos() * factor, angles.sin() * factor


def attention_factor(scaling: RopeScaling) -> float:
    """What cosine and sine are multiplied by: yarn's temperature (Peng et al. 2023, eq. 22), else
    1.
    """
    if scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0


def _stretch(frequencies: Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """What each frequency is multiplied by: 1 where it is kept, 1/factor where it is stretched."""
    if scaling.kind == "linear":
        return torch.full_like(frequencies, 1 / scaling.factor)
    assert scaling.original_max_position is not None
    if scaling.kind == "llama3":
        turns = scaling.original_max_position * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        ends = [
            _dimension_of(turns, head_dim, theta, scaling.original_max_position)
            for turns in (scaling.beta_fast, scaling.beta_slow)
        ]
        if scaling.truncate:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        first, last = max(ends[0], 0), min(ends[1], head_dim - 1)
        index = torch.arange(len(frequencies), device=frequencies.device, dtype=frequencies.dtype)
        width = last - first if last != first else 0.001  # a step, where the ramp has no width
        kept = 1 - ((index - first) / width).clamp(0, 1)
    return kept + (1 - kept) / scaling.factor


def _dimension_of(turns: float, head_dim: int, theta: float, positions: int) -> float:
    """The index of the frequency that turns so many times over ``positions``."""
    return head_dim * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(theta))


def rotate(x_RNH: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x[i], x[i + H/2]) of every head by its row's angle; same shape and dtype
    as ``x_RNH``.
    """
    cos, sin = (part[:, None, :].to(x_RNH.dtype) for part in table)
    first, second = x_RNH.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
