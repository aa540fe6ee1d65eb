"""Attention of query rows over keys and values, grouped-query heads included. Softmax scale is
1/sqrt(H).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Scope(NamedTuple):
    """What a layer's queries see and how.

    window:   keys up to the query's own that it sees; None: all of them.
    softcap:  scores become cap · tanh(score / cap); None: they stay.
    """

    window: int | None = None
    softcap: float | None = None

    def within(self, positions: Tensor, key_positions: Tensor) -> Tensor:
        """Which keys a query may see by its position: broadcast over both, True where it may."""
        causal = key_positions <= positions
        if self.window is None:
            return causal
        return causal & (key_positions > positions - self.window)

    def hides(self, num_keys: int) -> bool:
        """Whether the window hides anything from any of the first ``num_keys`` positions."""
        return self.window is not None and self.window < num_keys


EVERYTHING = Scope()


def batch_attention(
    q_BSNH: Tensor,
    k_BUKH: Tensor,
    v_BUKH: Tensor,
    mask: Tensor | None,
    softcap: float | None = None,
) -> Tensor:
    """Attention inside each of B sequences; ``mask`` is [B or 1, 1, S, U], True where a query may
    look.

    Without a mask it is causal and U = S. Returns [B, S, N, H].
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BSNH, k_BUKH, v_BUKH))
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return _attend(q, k, v, mask, softcap, causal=mask is None).transpose(1, 2)


def row_attention(
    q_RNH: Tensor,
    k_KSH: Tensor,
    v_KSH: Tensor,
    mask_RS: Tensor | None,
    softcap: float | None = None,
) -> Tensor:
    """R query rows over one sequence's keys, every key read once for all rows and heads of its
    group.

    All rows, whichever flow they belong to, become query lanes of their key-value head (grouped
    execution). Returns [R, N, H].
    """
    num_rows, num_heads, head_dim = q_RNH.shape
    kv_heads = k_KSH.shape[0]
    groups = num_heads // kv_heads
    q = q_RNH.view(num_rows, kv_heads, groups, head_dim).permute(1, 2, 0, 3)
    q = q.reshape(1, kv_heads, groups * num_rows, head_dim)
    mask = None if mask_RS is None else mask_RS.repeat(groups, 1)
    out = _attend(q, k_KSH[None], v_KSH[None], mask, softcap)
    out = out.view(kv_heads, groups, num_rows, head_dim).permute(2, 0, 1, 3)
    return out.reshape(num_rows, num_heads, head_dim)


def row_attention_with_own(
    q_ANH: Tensor,
    k_AKSH: Tensor,
    v_AKSH: Tensor,
    mask_AS: Tensor,
    own: tuple[Tensor, Tensor] | None,
    softcap: float | None = None,
) -> Tensor:
    """Each row over keys of its own choosing, and over one private key and value ``own`` ([A, K, H]
    each) if given.

    Returns [A, N, H]. Keys are materialised per row: right for few rows.
    """
    num_rows, num_heads, head_dim = q_ANH.shape
    kv_heads = k_AKSH.shape[1]
    if own is not None:
        k_AKSH = torch.cat([k_AKSH, own[0][:, :, None]], dim=2)
        v_AKSH = torch.cat([v_AKSH, own[1][:, :, None]], dim=2)
        mask_AS = F.pad(mask_AS, (0, 1), value=True)
    q = q_ANH.view(num_rows, kv_heads, num_heads // kv_heads, head_dim)
    out = _attend(q, k_AKSH, v_AKSH, mask_AS[:, None, None, :], softcap)
    return out.reshape(num_rows, num_heads, head_dim)


def group_attention(
    q_BRNH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    mask_BRS: Tensor | None,
    softcap: float | None = None,
) -> Tensor:
    """``row_attention`` for B sequences at once, R query rows each. Returns [B, R, N, H]."""
    batch, num_rows, num_heads, head_dim = q_BRNH.shape
    kv_heads = k_BKSH.shape[1]
    groups = num_heads // kv_heads
    q = q_BRNH.view(batch, num_rows, kv_heads, groups, head_dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch, kv_heads, groups * num_rows, head_dim)
    mask = None if mask_BRS is None else mask_BRS.repeat(1, groups, 1)[:, None]
    out = _attend(q, k_BKSH, v_BKSH, mask, softcap)
    out = out.view(batch, kv_heads, groups, num_rows, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, num_rows, num_heads, head_dim)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    softcap: float | None,
    causal: bool = False,
) -> Tensor:
    """Softmax attention over [..., rows, H] and [..., keys, H]; no fused kernel caps its scores."""
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    if causal:
        mask = q.new_ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    scores = softcap * (scores / softcap).tanh()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    return scores.softmax(-1, dtype=wide).to(v.dtype) @ v
