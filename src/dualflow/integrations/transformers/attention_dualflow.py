"""Positions, masks and attention of a Dual-Flow Transformer for the `transformers` library.

Shapes: B sequences, S queries, F flows, N query heads on K key-value heads, H head, U keys.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .configuration_dualflow import DualFlowConfig

Positions = slice | Tensor
Rotary = tuple[Tensor, Tensor]


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are taken in: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rotary_table(positions: Tensor, config: DualFlowConfig, local: bool) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles of ``positions`` [B, S], in their dtype: [B, S, 1, H/2] each.

    ``local``: of the layers with a sliding window, where they have a base of their own.
    """
    c, size = config.config, config.head_dim
    theta: float = c["rope_theta"]
    scaling: dict[str, Any] | None = c["rope_scaling"]
    if local and c["local_rope_theta"] is not None:
        theta, scaling = c["local_rope_theta"], None
    index = torch.arange(0, size, 2, device=positions.device, dtype=positions.dtype)
    frequencies, factor = theta ** -(index / size), 1.0
    if scaling is not None:
        kept = _kept(frequencies, theta, size, scaling)
        frequencies = frequencies * (kept + (1 - kept) / scaling["factor"])
        if scaling["kind"] == "yarn":
            factor = scaling["attention_factor"] or 0.1 * math.log(scaling["factor"]) + 1
    angles = positions[..., None, None] * frequencies
    return angles.cos() * factor, angles.sin() * factor


def _kept(frequencies: Tensor, theta: float, size: int, scaling: dict[str, Any]) -> Tensor:
    """How much of each frequency scaling leaves as it is: 1 all of it, 0 it is divided whole."""
    kind, original = scaling["kind"], scaling["original_max_position"]
    if kind == "linear":
        return torch.zeros_like(frequencies)
    if kind == "llama3":
        turns = original * frequencies / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        return ((turns - low) / (high - low)).clamp(0, 1)
    if kind != "yarn":
        raise ValueError(f"rope_scaling kind is {kind!r}; expected linear, llama3 or yarn")
    first, last = (
        size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (scaling["beta_fast"], scaling["beta_slow"])
    )
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    place = torch.arange(len(frequencies), device=frequencies.device, dtype=frequencies.dtype)
    return 1 - ((place - first) / ((last - first) or 0.001)).clamp(0, 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + H/2]) of [..., S, heads, H]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Sight:
    """Which keys the primary's queries may see, for any window and any cache.

    padding:    [B, past + length], False at padding; None: there is none.
    documents:  [B, length], the number of the text a position belongs to, where several share a
                row.
    explicit:   whether every mask is written out; else what sees all before it needs none.
    """

    def __init__(self, padding: Tensor | None, documents: Tensor | None, past: int, length: int,
                 explicit: bool, device: torch.device) -> None:  # fmt: skip
        self.padding, self.documents = padding, documents
        self.past, self.length, self.explicit = past, length, explicit
        self.places = torch.arange(past, past + length, device=device)
        self._made: dict[tuple[int | None, int], Tensor | None] = {}

    def mask(self, window: int | None, num_keys: int) -> Tensor | None:
        """[1 or B, 1, S, U], True where a query may look; None: at all up to its own position.

        A cache that keeps a window returns the last keys; a static one has room after the last.
        """
        if (window, num_keys) not in self._made:
            self._made[window, num_keys] = self._make(window, num_keys)
        return self._made[window, num_keys]

    def _make(self, window: int | None, num_keys: int) -> Tensor | None:
        total = self.past + self.length
        plain = self.padding is None and self.documents is None and not self.explicit
        plain = plain and (window is None or num_keys <= window) and num_keys <= total
        if plain and (self.length == 1 or self.length == num_keys):
            return None
        start = max(total - num_keys, 0)
        keys = torch.arange(start, start + num_keys, device=self.places.device)
        queries = self.places[:, None]
        mask = (
            (keys <= queries) if window is None else (keys <= queries) & (keys > queries - window)
        )
        if self.documents is not None:
            mask = mask & (self.documents[:, None, :, None] == self.documents[:, None, None, :])
        if self.padding is not None:
            real = F.pad(self.padding[:, start:total], (0, num_keys - (total - start)))
            # A padded query sees itself: a softmax over nothing would be not-a-number.
            mask = mask & real[:, None, None, :] | (keys == queries)
        return mask if mask.dim() == 4 else mask[None, None]


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None,
    fused: bool,
) -> Tensor:  # fmt: skip
    """softmax(scale q·k) v for queries [F, B, S, N, H] over keys [B, K, U, H]: [F, B, S, N·H].

    The flows' queries are further query heads of their key-value head, so its keys are read once.
    """
    flows, _, length = q.shape[:3]
    q = (
        q.unflatten(3, (k.shape[1], -1)).permute(1, 3, 0, 4, 2, 5).flatten(2, 3)
    )  # [B, K, F·G, S, H]
    groups = q.shape[2]
    if not fused or softcap is not None:
        scores = q @ k[:, :, None].transpose(-1, -2) * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        if mask is None and length > 1:
            mask = scores.new_ones(length, length, dtype=torch.bool).tril()[None, None]
        if mask is not None:
            scores = scores.masked_fill(~mask[:, :, None], -torch.inf)
        out = scores.softmax(-1, dtype=wide(scores.dtype)).to(v.dtype) @ v[:, :, None]
    elif length == 1:
        out = F.scaled_dot_product_attention(q[..., 0, :], k, v, attn_mask=mask, scale=scale)
    else:
        out = F.scaled_dot_product_attention(
            q.flatten(1, 2), k, v, attn_mask=mask, is_causal=mask is None, scale=scale,
            enable_gqa=True,
        )  # fmt: skip
    out = out.reshape(q.shape).unflatten(2, (flows, groups // flows))
    return out.permute(2, 0, 4, 1, 3, 5).flatten(3)
