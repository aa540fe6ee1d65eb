"""The slow twins: each function says plainly what its fast counterpart must compute. For tests
and for reading.
"""

import math

import numpy as np
import torch
from torch import Tensor


def attention(q_NH: Tensor, k_SKH: Tensor, v_SKH: Tensor) -> Tensor:
    """One query row over S keys, head by head: softmax(q·k / sqrt(H)) v, [N, H]."""
    groups = len(q_NH) // k_SKH.shape[1]
    out = []
    for head, query in enumerate(q_NH):
        keys, values = k_SKH[:, head // groups], v_SKH[:, head // groups]
        out.append((keys @ query / query.shape[-1] ** 0.5).softmax(0) @ values)
    return torch.stack(out)


def rotate(x_H: Tensor, position: int, theta: float) -> Tensor:
    """Turn the complex numbers x[i] + j·x[i + H/2] by position · theta^(−2i/H)."""
    half = len(x_H) // 2
    index = torch.arange(half, dtype=torch.float64)
    turn = torch.polar(torch.ones(half, dtype=torch.float64), position * theta ** (-index / half))
    turned = torch.complex(x_H[:half].double(), x_H[half:].double()) * turn
    return torch.cat([turned.real, turned.imag]).to(x_H.dtype)


def mixture_loss(
    logits1_TV: Tensor, logits2_FTV: Tensor, targets_T: Tensor, *,
    alpha_gradient: bool = True, primary_loss_weight: float = 0.0,
) -> Tensor:  # fmt: skip
    """Σ_t −log r(y_t) − λ log p(y_t), with all probabilities held at once. Use it in float64."""
    p_TV = logits1_TV.softmax(-1)
    q_TV = logits2_FTV.softmax(-1).mean(0)
    alpha_T = p_TV.square().sum(-1).clamp(0.5, 1.0)
    if not alpha_gradient:
        alpha_T = alpha_T.detach()
    r_TV = alpha_T[:, None] * p_TV + (1 - alpha_T[:, None]) * q_TV
    index = targets_T[:, None]
    return -(r_TV.gather(1, index).log() + primary_loss_weight * p_TV.gather(1, index).log()).sum()


def quantise_group(weights: list[float], levels: int) -> tuple[list[int], float, float]:
    """Codes, scale and minimum of one group: 127 levels for int8, whose minimum is 0, 15 for int4.

    Every weight is within half a scale of scale · code + minimum.
    """
    minimum, largest = 0.0, max(abs(w) for w in weights)
    if levels == 15:
        minimum = half_beside(min(weights), above=False)
        largest = max(weights) - minimum
    scale = half(largest / levels)
    if largest > scale * (levels + 0.5):
        scale = half_beside(largest / levels, above=True)
    codes = [round((w - minimum) / scale) if scale else 0 for w in weights]
    lowest = -levels if levels == 127 else 0
    return [min(max(code, lowest), levels) for code in codes], scale, minimum


def half(x: float) -> float:
    """The float16 nearest to ``x``."""
    return float(np.float16(x))


def half_beside(x: float, *, above: bool) -> float:
    """The nearest float16 that is not below ``x``; with ``above`` false, not above it."""
    near = np.float16(x)
    if (float(near) < x) if above else (float(near) > x):
        near = np.nextafter(near, np.float16(math.inf if above else -math.inf))
    return float(near)
