"""The slow twins: each function says plainly what its fast counterpart must compute. For tests
and for reading.
"""

import math

import numpy as np
import torch
from torch import Tensor

from dualflow.spec import MoEConfig


def attention(q_NH: Tensor, k_SKH: Tensor, v_SKH: Tensor, softcap: float | None = None) -> Tensor:
    """One query row over S keys, head by head: softmax(q·k / sqrt(H)) v, [N, H]; every score x
    becomes softcap · tanh(x / softcap) where that is given.
    """
    groups = len(q_NH) // k_SKH.shape[1]
    out = []
    for head, query in enumerate(q_NH):
        keys, values = k_SKH[:, head // groups], v_SKH[:, head // groups]
        scores = keys @ query / query.shape[-1] ** 0.5
        if softcap is not None:
            scores = torch.stack([softcap * torch.tanh(score / softcap) for score in scores])
        out.append(scores.softmax(0) @ values)
    return torch.stack(out)


def rotate(x_H: Tensor, position: int, theta: float) -> Tensor:
    """Turn the complex numbers x[i] + j·x[i + H/2] by position · theta^(−2i/H)."""
    half = len(x_H) // 2
    index = torch.arange(half, dtype=torch.float64)
    turn = torch.polar(torch.ones(half, dtype=torch.float64), position * theta ** (-index / half))
    turned = torch.complex(x_H[:half].double(), x_H[half:].double()) * turn
    return torch.cat([turned.real, turned.imag]).to(x_H.dtype)


def choose_experts(
    logits_E: list[float], moe: MoEConfig, k: int, bias_E: list[float] | None = None
) -> dict[int, float]:
    """The experts of one row and their weights, best first."""
    if moe.scores == "softmax":
        largest = max(logits_E)
        total = math.fsum(math.exp(x - largest) for x in logits_E)
        scores = [math.exp(x - largest) / total for x in logits_E]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits_E]
    choice = [
        score + bias for score, bias in zip(scores, bias_E or [0.0] * len(scores), strict=True)
    ]
    size = moe.num_experts // moe.num_groups
    groups = [range(first, first + size) for first in range(0, moe.num_experts, size)]
    groups.sort(key=lambda group: -sum(sorted(choice[e] for e in group)[-2:]))
    allowed = sorted(e for group in groups[: moe.groups_per_token] for e in group)
    chosen = sorted(allowed, key=lambda e: -choice[e])[:k]
    total = math.fsum(scores[e] for e in chosen) if moe.normalise else 1.0
    return {e: scores[e] / total * moe.scaling for e in chosen}


def mixture_loss(
    logits1_TV: Tensor, logits2_FTV: Tensor, targets_T: Tensor, *,
    alpha_gradient: bool = True, primary_loss_weight: float = 0.0,
    alpha_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Σ_t −log r(y_t) − λ log p(y_t), with all probabilities held at once; α is learned where
    ``alpha_weight`` is given. Use it in float64.
    """
    p_TV = logits1_TV.softmax(-1)
    q_TV = logits2_FTV.softmax(-1).mean(0)
    alpha_T = p_TV.square().sum(-1).clamp(0.5, 1.0)
    if alpha_weight is not None:
        sure_T2 = torch.stack([p_TV.square().sum(-1), q_TV.square().sum(-1)], dim=-1)
        alpha_T = (alpha_weight[0] + sure_T2.logit() @ alpha_weight[1:]).sigmoid()
    if not alpha_gradient:
        alpha_T = alpha_T.detach()
    r_TV = alpha_T[:, None] * p_TV + (1 - alpha_T[:, None]) * q_TV
    index = targets_T[:, None]
    return -(r_TV.gather(1, index).log() + primary_loss_weight * p_TV.gather(1, index).log()).sum()


def quantise_group(weights: list[float], levels: int) -> tuple[list[int], float, float]:
    """Codes, scale and minimum of one group, its range divided evenly: 127 levels for int8, whose
    minimum is 0, 15 for int4. Every weight is within half a scale of scale · code + minimum.

    All of int8; of int4 what ``fitted_group`` has to be better than.
    """
    minimum, largest = 0.0, max(abs(w) for w in weights)
    if levels == 15:
        minimum = half_beside(min(weights), above=False)
        largest = max(weights) - minimum
    scale = half(largest / levels)
    if largest > scale * (levels + 0.5):
        scale = half_beside(largest / levels, above=True)
    lowest = -levels if levels == 127 else 0
    return nearest_codes(weights, scale, minimum, lowest, levels), scale, minimum


def fitted_group(weights: list[float]) -> tuple[list[int], float, float]:
    """Codes, scale and minimum of one int4 group: of all that are tried, the least squared error.

    Tried are the even division by 15 steps; grids of 8 to 15 steps between the extremes, as they
    are, counted from any of their points up or down; these and grids over a part of the range with
    the line through codes and weights in their place; and at last the line of the best so far.
    """
    low, span = min(weights), max(weights) - min(weights)
    tried = [quantise_group(weights, 15)]
    for steps in range(8, 16):
        step = half(span / steps)
        codes = nearest_codes(weights, step, low)
        tried.append(line_through(codes, weights, step))
        for zero in range(steps - 15, 1):
            tried.append(([code - zero for code in codes], step, half(low + step * zero)))
        for zero in range(steps, 16):
            tried.append(([zero - code for code in codes], -step, half(low + step * zero)))
    for part in (0.95, 0.9, 0.85):
        step = span * part / 15
        codes = nearest_codes(weights, step, low + span * (1 - part) / 2)
        tried.append(line_through(codes, weights, step))
    finite = [group for group in tried if math.isfinite(group[1]) and math.isfinite(group[2])]
    best = min(finite, key=lambda group: squared_error(weights, *group))
    line = line_through(nearest_codes(weights, *best[1:]), weights, best[1])
    best = min(best, line, key=lambda group: squared_error(weights, *group))
    return nearest_codes(weights, *best[1:]), *best[1:]


def nearest_codes(
    weights: list[float], scale: float, minimum: float, lowest: int = 0, highest: int = 15
) -> list[int]:
    """The codes whose scale · code + minimum are nearest; 0 where the scale is 0."""
    codes = [round((w - minimum) / scale) if scale else 0 for w in weights]
    return [min(max(code, lowest), highest) for code in codes]


def line_through(
    codes: list[int], weights: list[float], scale: float
) -> tuple[list[int], float, float]:
    """The codes with the float16 scale, and then the float16 minimum, of least squared error. Where
    all codes are one, no scale is better than the given one.
    """
    code_mean, mean = math.fsum(codes) / len(codes), math.fsum(weights) / len(weights)
    spread = math.fsum((code - code_mean) ** 2 for code in codes)
    if spread:
        pairs = zip(codes, weights, strict=True)
        scale = math.fsum((code - code_mean) * (w - mean) for code, w in pairs) / spread
    scale = half(scale)
    return codes, scale, half(mean - scale * code_mean)


def squared_error(weights: list[float], codes: list[int], scale: float, minimum: float) -> float:
    """Σ (weight − (scale · code + minimum))²."""
    pairs = zip(codes, weights, strict=True)
    return math.fsum((w - (scale * code + minimum)) ** 2 for code, w in pairs)


def half(x: float) -> float:
    """The float16 nearest to ``x``; infinite where that is beyond them."""
    with np.errstate(over="ignore"):
        return float(np.float16(x))


def half_beside(x: float, *, above: bool) -> float:
    """The nearest float16 that is not below ``x``; with ``above`` false, not above it."""
    near = np.float16(x)
    if (float(near) < x) if above else (float(near) > x):
        near = np.nextafter(near, np.float16(math.inf if above else -math.inf))
    return float(near)
