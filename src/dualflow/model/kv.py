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
from dualflow.ops.attention import (
    EVERYTHING,
    Scope,
    batch_attention,
    row_attention,
    row_attention_with_own,
)

OwnKeyValue = tuple[Tensor, Tensor]
"""Private key and value of each auxiliary row (PHD-2 only), [A, K, H] each; never stored."""


class KVReader(Protocol):
    """Keys and values of one layer, read-only."""

    def attend(
        self, q_RNH: Tensor, rows: Rows, own: OwnKeyValue | None = None, scope: Scope = EVERYTHING
    ) -> Tensor:
        """Every row over the keys up to its own position that ``scope`` shows: [R, N, H]."""
        ...


class KVWriter(Protocol):
    """The primary's access to one layer's keys and values."""

    def append(self, k_TKH: Tensor, v_TKH: Tensor) -> KVReader:
        """Store the step's T keys and values (T may be 0) and hand out the reader."""
        ...


class Remembered:
    """A writer for one step with primary rows, whose reader also serves later steps without any."""

    def __init__(self, writer: KVWriter) -> None:
        self._writer = writer
        self._reader: KVReader | None = None

    def append(self, k_TKH: Tensor, v_TKH: Tensor) -> KVReader:
        if self._reader is None:
            self._reader = self._writer.append(k_TKH, v_TKH)
        else:
            assert not len(k_TKH), "these keys and values are complete"
        return self._reader


class BatchKV:
    """Keys and values of B whole sequences of S tokens, held for the step alone: training and
    scoring.

    Primary row b*S + t is token t of sequence b. Tokens of other documents are hidden where
    ``document_ids_BS`` is given.
    """

    def __init__(self, batch: int, length: int, document_ids_BS: Tensor | None = None) -> None:
        self.batch, self.length = batch, length
        self._document_ids_BS = document_ids_BS
        self._masks: dict[int | None, Tensor] = {}

    def append(self, k_TKH: Tensor, v_TKH: Tensor) -> "BatchReader":
        shape = (self.batch, self.length)
        return BatchReader(k_TKH.unflatten(0, shape), v_TKH.unflatten(0, shape), self)

    def mask(self, scope: Scope, device: torch.device) -> Tensor | None:
        """[B or 1, 1, S, S], True where a query may look; None: at all tokens up to its own."""
        documents = self._document_ids_BS
        if documents is None and not scope.hides(self.length):
            return None
        if scope.window not in self._masks:
            steps = torch.arange(self.length, device=device)
            mask = scope.within(steps[:, None], steps)[None]
            if documents is not None:
                mask = mask & (documents[:, :, None] == documents[:, None, :])
            self._masks[scope.window] = mask[:, None]
        return self._masks[scope.window]


class BatchReader:
    """Reader of ``BatchKV``; its ``append`` accepts nothing, so it also serves later steps
    without primary rows.
    """

    def __init__(self, k_BSKH: Tensor, v_BSKH: Tensor, batch: BatchKV) -> None:
        self.k_BSKH, self.v_BSKH, self.batch = k_BSKH, v_BSKH, batch

    def append(self, k_TKH: Tensor, v_TKH: Tensor) -> "BatchReader":
        if len(k_TKH):
            raise ValueError(
                "these keys and values are complete; a step that reads them has no primary rows"
            )
        return self

    def attend(
        self, q_RNH: Tensor, rows: Rows, own: OwnKeyValue | None = None, scope: Scope = EVERYTHING
    ) -> Tensor:
        blocks = []
        if rows.num_primary:
            blocks.append(self._whole(rows.primary(q_RNH), None, scope))
        if rows.num_flows:
            for q_ANH in rows.aux(q_RNH).unbind(0):
                pins = rows.pins_A
                blocks.append(
                    self._whole(q_ANH, own, scope)
                    if pins is None
                    else self._some(q_ANH, pins, own, scope)
                )
        return torch.cat(blocks)

    def _whole(self, q_TNH: Tensor, own: OwnKeyValue | None, scope: Scope) -> Tensor:
        """One query for every token."""
        shape = self.k_BSKH.shape[:2]
        k, v, mask = self.k_BSKH, self.v_BSKH, self.batch.mask(scope, q_TNH.device)
        if own is not None:
            k, v = (
                torch.cat([x, y.unflatten(0, shape)], dim=1)
                for x, y in zip((k, v), own, strict=True)
            )
            eye = torch.eye(shape[1], dtype=torch.bool, device=k.device)
            causal = eye.new_ones(eye.shape).tril()[None, None] if mask is None else mask
            mask = torch.cat([causal, eye.expand_as(causal)], dim=-1)
        out_BSNH = batch_attention(q_TNH.unflatten(0, shape), k, v, mask, scope.softcap)
        return out_BSNH.flatten(0, 1)

    def _some(self, q_ANH: Tensor, pins_A: Tensor, own: OwnKeyValue | None, scope: Scope) -> Tensor:
        """Queries at the tokens ``pins_A`` alone."""
        length = self.k_BSKH.shape[1]
        sequence, step = pins_A // length, pins_A % length
        k, v = (x[sequence].transpose(1, 2) for x in (self.k_BSKH, self.v_BSKH))
        whole = self.batch.mask(scope, q_ANH.device)
        if whole is None:
            mask = torch.arange(length, device=pins_A.device) <= step[:, None]
        else:
            mask = whole.expand(self.batch.batch, -1, -1, -1)[sequence, 0, step]
        return row_attention_with_own(q_ANH, k, v, mask, own, scope.softcap)


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

    def attend(
        self, q_RNH: Tensor, rows: Rows, own: OwnKeyValue | None = None, scope: Scope = EVERYTHING
    ) -> Tensor:
        length, softcap = self._k_KSH.shape[1], scope.softcap
        keys = torch.arange(length, device=q_RNH.device)
        mask_RS = scope.within(rows.positions_R[:, None], keys)
        if own is None:
            # One primary row and its own auxiliary rows: all of them see every key there is.
            alone = rows.kept is None and rows.num_primary == 1 and len(q_RNH) == 1 + rows.num_flows
            mask = None if alone and not scope.hides(length) else mask_RS
            return row_attention(q_RNH, self._k_KSH, self._v_KSH, mask, softcap)
        first = rows.num_primary
        primary = row_attention(q_RNH[:first], self._k_KSH, self._v_KSH, mask_RS[:first], softcap)
        k, v = (x.expand(len(q_RNH) - first, *x.shape) for x in (self._k_KSH, self._v_KSH))
        aux = row_attention_with_own(q_RNH[first:], k, v, mask_RS[first:], own, softcap)
        return torch.cat([primary, aux])
