"""Who may touch keys and values. The primary appends; what it gets back can only be read, by both
flows.

A writer covers one layer of one step. ``append`` takes the primary's keys and values and returns
the reader through which primary and auxiliary rows attend, so an auxiliary row has nothing to write
with.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dualflow.model.rows import Rows
from dualflow.ops.attention import batch_attention, row_attention, row_attention_with_own

OwnKeyValue = tuple[Tensor, Tensor]
"""Private key and value of each auxiliary row (PHD-2 only), [A, K, H] each; never stored."""


class KVReader(Protocol):
    """Keys and values of one layer, read-only."""

    def attend(self, q_RNH: Tensor, rows: Rows, own: OwnKeyValue | None = None) -> Tensor:
        """Every row over the keys at its own position and before: [R, N, H]."""
        ...


class KVWriter(Protocol):
    """The primary's access to one layer's keys and values."""

    def append(self, k_TKH: Tensor, v_TKH: Tensor) -> KVReader:
        """Store the step's T keys and values (T may be 0) and hand out the reader."""
        ...


class BatchKV:
    """Keys and values of B whole sequences of S tokens, held for the step alone: training and
    scoring.

    Primary row b*S + t is token t of sequence b. Tokens of other documents are hidden where
    ``document_ids_BS`` is given.
    """

    def __init__(self, batch: int, length: int, document_ids_BS: Tensor | None = None) -> None:
        self.batch, self.length = batch, length
        self.mask: Tensor | None = None
        if document_ids_BS is not None:
            steps = torch.arange(length, device=document_ids_BS.device)
            same = document_ids_BS[:, :, None] == document_ids_BS[:, None, :]
            self.mask = (same & (steps[:, None] >= steps))[:, None]

    def append(self, k_TKH: Tensor, v_TKH: Tensor) -> "BatchReader":
        shape = (self.batch, self.length)
        return BatchReader(k_TKH.unflatten(0, shape), v_TKH.unflatten(0, shape), self.mask)


class BatchReader:
    """Reader of ``BatchKV``; its ``append`` accepts nothing, so it also serves later steps
    without primary rows.
    """

    def __init__(self, k_BSKH: Tensor, v_BSKH: Tensor, mask: Tensor | None) -> None:
        self.k_BSKH, self.v_BSKH, self.mask = k_BSKH, v_BSKH, mask

    def append(self, k_TKH: Tensor, v_TKH: Tensor) -> "BatchReader":
        if len(k_TKH):
            raise ValueError(
                "these keys and values are complete; a step that reads them has no primary rows"
            )
        return self

    def attend(self, q_RNH: Tensor, rows: Rows, own: OwnKeyValue | None = None) -> Tensor:
        blocks = []
        if rows.num_primary:
            blocks.append(self._whole(rows.primary(q_RNH), None))
        if rows.num_flows:
            for q_ANH in rows.aux(q_RNH).unbind(0):
                pins = rows.pins_A
                blocks.append(
                    self._whole(q_ANH, own) if pins is None else self._some(q_ANH, pins, own)
                )
        return torch.cat(blocks)

    def _whole(self, q_TNH: Tensor, own: OwnKeyValue | None) -> Tensor:
        """One query for every token."""
        shape = self.k_BSKH.shape[:2]
        k, v, mask = self.k_BSKH, self.v_BSKH, self.mask
        if own is not None:
            k, v = (
                torch.cat([x, y.unflatten(0, shape)], dim=1)
                for x, y in zip((k, v), own, strict=True)
            )
            eye = torch.eye(shape[1], dtype=torch.bool, device=k.device)
            causal = eye.new_ones(eye.shape).tril()[None, None] if mask is None else mask
            mask = torch.cat([causal, eye.expand_as(causal)], dim=-1)
        return batch_attention(q_TNH.unflatten(0, shape), k, v, mask).flatten(0, 1)

    def _some(self, q_ANH: Tensor, pins_A: Tensor, own: OwnKeyValue | None) -> Tensor:
        """Queries at the tokens ``pins_A`` alone."""
        length = self.k_BSKH.shape[1]
        sequence, step = pins_A // length, pins_A % length
        k, v = (x[sequence].transpose(1, 2) for x in (self.k_BSKH, self.v_BSKH))
        if self.mask is None:
            mask = torch.arange(length, device=pins_A.device) <= step[:, None]
        else:
            mask = self.mask[sequence, 0, step]
        return row_attention_with_own(q_ANH, k, v, mask, own)


class ContiguousCache:
    """The KV cache of one sequence, allocated once for ``max_length`` tokens: [K, max_length, H]
    per layer, twice.
    """

    def __init__(
        self, num_layers: int, kv_heads: int, head_dim: int, max_length: int, *,
        device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.max_length = max_length
        shape = (kv_heads, max_length, head_dim)
        self._layers = [
            _CacheLayer(*(torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)))
            for _ in range(num_layers)
        ]

    def writers(self) -> Sequence[KVWriter]:
        """One writer per layer, for the primary's rows of the next step."""
        return self._layers

    @property
    def length(self) -> int:
        """Tokens stored so far."""
        return self._layers[0].length

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(layer.k_KSH.nbytes + layer.v_KSH.nbytes for layer in self._layers)

    @property
    def nbytes_used(self) -> int:
        """Bytes that hold the tokens stored so far."""
        return self.nbytes * self.length // self.max_length

    def tensors(self) -> list[tuple[Tensor, Tensor]]:
        """The stored keys and values of every layer, [K, length, H] each: for tests and
        inspection.
        """
        return [layer.stored() for layer in self._layers]


class _CacheLayer:
    """One layer of ``ContiguousCache``: the writer; the reader it hands out knows only what is
    stored by then.
    """

    def __init__(self, k_KSH: Tensor, v_KSH: Tensor) -> None:
        self.k_KSH, self.v_KSH, self.length = k_KSH, v_KSH, 0

    def stored(self) -> tuple[Tensor, Tensor]:
        return self.k_KSH[:, : self.length], self.v_KSH[:, : self.length]

    def append(self, k_TKH: Tensor, v_TKH: Tensor) -> "_CacheReader":
        end = self.length + len(k_TKH)
        if end > self.k_KSH.shape[1]:
            raise ValueError(f"the KV cache holds {self.k_KSH.shape[1]} tokens; {end} do not fit")
        self.k_KSH[:, self.length : end] = k_TKH.transpose(0, 1)
        self.v_KSH[:, self.length : end] = v_TKH.transpose(0, 1)
        self.length = end
        return _CacheReader(*self.stored())


class _CacheReader:
    def __init__(self, k_KSH: Tensor, v_KSH: Tensor) -> None:
        self._k_KSH, self._v_KSH = k_KSH, v_KSH

    def attend(self, q_RNH: Tensor, rows: Rows, own: OwnKeyValue | None = None) -> Tensor:
        length = self._k_KSH.shape[1]
        mask_RS = torch.arange(length, device=q_RNH.device) <= rows.positions_R[:, None]
        if own is None:
            # One primary row and its own auxiliary rows: all of them see every key there is.
            alone = rows.kept is None and rows.num_primary == 1 and len(q_RNH) == 1 + rows.num_flows
            return row_attention(q_RNH, self._k_KSH, self._v_KSH, None if alone else mask_RS)
        first = rows.num_primary
        primary = row_attention(q_RNH[:first], self._k_KSH, self._v_KSH, mask_RS[:first])
        k, v = (x.expand(len(q_RNH) - first, *x.shape) for x in (self._k_KSH, self._v_KSH))
        return torch.cat(
            [primary, row_attention_with_own(q_RNH[first:], k, v, mask_RS[first:], own)]
        )
