"""The paged KV cache in torch tensors: the primary's keys and values alone, in pages of Z tokens.

What the model sees are the reader and writer protocols of ``model.kv``; where a row's keys lie is
in the step's ``Layout``, made once and used by every layer.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from dualflow.engine.paged_layout import Group, Layout
from dualflow.model.kv import KVReader, KVWriter, OwnKeyValue
from dualflow.model.rows import Rows
from dualflow.ops.attention import EVERYTHING, Scope, batch_attention, group_attention
from dualflow.spec import ModelConfig

KVDtype = Literal["float64", "float32", "bfloat16", "int8"]
KV_DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}


class PagedCache:
    """Keys and values of every layer, [P, K, Z, H] each; a token's place is (page, offset).

    ``int8`` keeps one float32 scale for each token and head, symmetric about zero. Which sequence
    owns which page is the scheduler's affair.
    """

    def __init__(
        self, config: ModelConfig, num_pages: int, page_size: int, dtype: KVDtype,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        if dtype not in KV_DTYPES:
            raise ValueError(f"the KV cache's dtype is {dtype!r}; expected {', '.join(KV_DTYPES)}")
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        self.num_pages, self.page_size = num_pages, page_size
        shape = (num_pages, config.kv_heads, page_size, config.head_size)
        make = _Int8Pages if dtype == "int8" else _FloatPages
        self._layers = [
            tuple(make(shape, KV_DTYPES[dtype], device) for _ in range(2))
            for _ in range(config.num_layers)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(pages.nbytes for layer in self._layers for pages in layer)

    def tensors(self) -> list[tuple[Tensor, Tensor]]:
        """The stored keys and values of every layer, [P, K, Z, H] each: for tests and
        inspection.
        """
        return [(k.stored_PKZH, v.stored_PKZH) for k, v in self._layers]

    def writers(self, layout: Layout) -> Sequence[KVWriter]:
        """One writer per layer for the rows of the step that ``layout`` describes."""
        return [_Writer(k, v, layout) for k, v in self._layers]

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, source to target, in every layer."""
        sources, targets = [source for source, _ in copies], [target for _, target in copies]
        for layer in self._layers:
            for pages in layer:
                pages.copy(sources, targets)


class _FloatPages:
    """Keys or values of one layer in a float format."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.stored_PKZH = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.stored_PKZH.nbytes

    def write(self, pages_T: Tensor, offsets_T: Tensor, x_TKH: Tensor) -> None:
        self.stored_PKZH[pages_T, :, offsets_T] = x_TKH.to(self.stored_PKZH.dtype)

    def clear(self, pages_P: Tensor) -> None:
        self.stored_PKZH[pages_P] = 0

    def read(self, pages_BP: Tensor, dtype: torch.dtype) -> Tensor:
        """Whole pages side by side, [B, K, pages x Z, H]."""
        return _side_by_side(self.stored_PKZH[pages_BP]).to(dtype)

    def copy(self, sources: list[int], targets: list[int]) -> None:
        self.stored_PKZH[targets] = self.stored_PKZH[sources]


class _Int8Pages:
    """Keys or values of one layer in 8 bits, x ≈ scale * int8, one scale per token and head."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.stored_PKZH = torch.zeros(shape, dtype=dtype, device=device)
        self.scale_PKZ = torch.zeros(shape[:-1], dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        return self.stored_PKZH.nbytes + self.scale_PKZ.nbytes

    def write(self, pages_T: Tensor, offsets_T: Tensor, x_TKH: Tensor) -> None:
        x_TKH = x_TKH.float()
        scale_TK = x_TKH.abs().amax(-1) / 127  # not a number where x is not: reading says so
        unit_TKH = x_TKH / scale_TK.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
        self.stored_PKZH[pages_T, :, offsets_T] = unit_TKH.round().to(torch.int8)
        self.scale_PKZ[pages_T, :, offsets_T] = scale_TK

    def clear(self, pages_P: Tensor) -> None:
        self.scale_PKZ[pages_P] = 0

    def read(self, pages_BP: Tensor, dtype: torch.dtype) -> Tensor:
        """Whole pages side by side, [B, K, pages x Z, H]."""
        scale_BPKZ1 = self.scale_PKZ[pages_BP][..., None].to(dtype)
        return _side_by_side(self.stored_PKZH[pages_BP].to(dtype) * scale_BPKZ1)

    def copy(self, sources: list[int], targets: list[int]) -> None:
        self.stored_PKZH[targets] = self.stored_PKZH[sources]
        self.scale_PKZ[targets] = self.scale_PKZ[sources]


_Pages = _FloatPages | _Int8Pages


def _side_by_side(x_BPKZH: Tensor) -> Tensor:
    return x_BPKZH.transpose(1, 2).flatten(2, 3)


class _Writer:
    """One layer in one step."""

    def __init__(self, k: _Pages, v: _Pages, layout: Layout) -> None:
        self._k, self._v, self._layout = k, v, layout

    def append(self, k_TKH: Tensor, v_TKH: Tensor) -> KVReader:
        layout = self._layout
        if len(layout.pages_T):
            for pages, x_TKH in ((self._k, k_TKH), (self._v, v_TKH)):
                if layout.begun_P is not None:
                    pages.clear(layout.begun_P)
                rows = x_TKH if layout.written_T is None else x_TKH[layout.written_T]
                pages.write(layout.pages_T, layout.offsets_T, rows)
        return _Reader(self._k, self._v, layout)


class _Reader:
    def __init__(self, k: _Pages, v: _Pages, layout: Layout) -> None:
        self._k, self._v, self._layout = k, v, layout

    def attend(
        self, q_RNH: Tensor, rows: Rows, own: OwnKeyValue | None = None, scope: Scope = EVERYTHING
    ) -> Tensor:
        blocks = [self._attend(q_RNH, group, own, scope) for group in self._layout.groups]
        out_RNH = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        order_R = self._layout.order_R
        return out_RNH if order_R is None else out_RNH[order_R]

    def _attend(self, q_RNH: Tensor, group: Group, own: OwnKeyValue | None, scope: Scope) -> Tensor:
        """The group's rows, sequence after sequence: [B x rows, N, H]."""
        q_BRNH = q_RNH[group.rows_BR]
        k_BKSH, v_BKSH = (
            pages.read(group.pages_BP, q_RNH.dtype)[:, :, : group.num_keys]
            for pages in (self._k, self._v)
        )
        if group.causal and not scope.hides(group.num_keys):
            k_BSKH, v_BSKH = k_BKSH.transpose(1, 2), v_BKSH.transpose(1, 2)
            return batch_attention(q_BRNH, k_BSKH, v_BSKH, None, scope.softcap).flatten(0, 1)
        mask_BRS = group.mask_BRS
        if scope.hides(group.num_keys):
            keys = torch.arange(group.num_keys, device=q_RNH.device)
            mask_BRS = scope.within(group.positions_BR[..., None], keys)
        if own is not None and group.own_BC is not None:
            own_BKCH = (x_AKH[group.own_BC].transpose(1, 2) for x_AKH in own)
            k_BKSH, v_BKSH = (
                torch.cat([cached, x], dim=2)
                for cached, x in zip((k_BKSH, v_BKSH), own_BKCH, strict=True)
            )
            mask_BRS = group.mask_with_own(mask_BRS)
        return group_attention(q_BRNH, k_BKSH, v_BKSH, mask_BRS, scope.softcap).flatten(0, 1)
