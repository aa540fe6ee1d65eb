"""The reference backend: any model on any device through the model's own step function."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualflow.engine.executor import Readout, StepRows
from dualflow.engine.kv_cache import KV_DTYPES, KVDtype, PagedCache
from dualflow.engine.paged_layout import Lanes, Layout, make_layout
from dualflow.model.backbone import AuxRows, CausalLM
from dualflow.model.readout import ReadoutLogProbs
from dualflow.model.rows import Kept
from dualflow.ops.mixture import log_softmax, mixture_alpha


@dataclass(frozen=True, slots=True)
class _Later:
    """What auxiliary rows that run later need of the read rows: ``kept`` layer by layer, the last
    hidden state, tokens and positions.
    """

    kept: Sequence[Kept]
    primary_TD: Tensor
    tokens_T: Tensor
    positions_T: Tensor


class TorchExecutor:
    """``Executor`` over a ``CausalLM`` of any variant and a paged cache on its device.

    kv_dtype: of the cache; None: the model's.
    """

    def __init__(
        self, model: CausalLM, num_pages: int, page_size: int = 32, kv_dtype: KVDtype | None = None
    ) -> None:
        self._model = model
        # Of a norm, not of a matrix: weights may be quantised, gains stay in the model's format.
        gain = next(model.model.norm.parameters())
        self._device = gain.device
        own = next(name for name, dtype in KV_DTYPES.items() if dtype == gain.dtype)
        self.cache = PagedCache(
            model.config, num_pages, page_size, kv_dtype or own,  # type: ignore[arg-type]
            self._device,
        )  # fmt: skip
        self._own_keys = model.config.variant == "phd2"
        self._mixture = (
            model.config.variant in ("dual", "two_softmax")
            and model.config.readout.kind == "mixture"
        )

    @property
    def cache_bytes(self) -> int:
        """Bytes of the whole paged cache."""
        return self.cache.nbytes

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, source to target, in every layer."""
        self.cache.copy_pages(copies)

    @torch.inference_mode()
    def step(self, rows: StepRows) -> Readout:
        """Run primary and auxiliary rows in one pass (grouped).

        A read row without an auxiliary row is NaN throughout where the model has no trained p.
        """
        positions = [p for s in rows.sequences for p in range(s.start, s.start + s.count)]
        tokens_T, positions_T = self._ids(rows.tokens), self._ids(positions)
        pins = [rows.read[i] for i in rows.aux]
        aux = None
        if pins:
            pins_A = self._ids(pins)
            aux = AuxRows(tokens_T[pins_A], positions_T[pins_A], pins_A)
        layout = self._layout(rows, positions, pins)
        writers = self.cache.writers(layout)
        out = self._model.step(tokens_T, positions_T, writers, aux=aux, keep=rows.keep)
        read_T = self._ids(rows.read)
        readout = self._read(out.primary_TD[read_T], out.aux_FAD, rows.aux)
        if rows.keep and out.kept is not None:
            kept = [layer.at(read_T) for layer in out.kept]
            readout.handle = _Later(
                kept, out.primary_TD[read_T], tokens_T[read_T], positions_T[read_T]
            )
        return readout

    @torch.inference_mode()
    def add_aux(self, rows: StepRows, readout: Readout, aux: Sequence[int]) -> Readout:
        """Run auxiliary rows for more of the read rows (indexes into ``read``) in a pass of their
        own, from what ``step`` kept (lazy): the readout that grouped execution would have given.
        """
        later = readout.handle
        if not isinstance(later, _Later):
            raise ValueError("this step kept nothing for later auxiliary rows; set keep")
        if not aux:
            return readout
        if any(readout.q_index[i] >= 0 for i in aux):
            raise ValueError(f"some of the rows {list(aux)} have auxiliary rows already")
        primary_AD = later.primary_TD[self._ids(aux)]
        out = self._model.log_probs(primary_AD, self._run_aux(rows, later, aux))
        return self._merge(readout, out, aux)

    def _run_aux(self, rows: StepRows, later: _Later, aux: Sequence[int]) -> Tensor:
        """[flows, A, D]: the last hidden states of auxiliary rows alone."""
        aux_A = self._ids(aux)
        if not self._model.config.num_flows:
            return later.primary_TD.new_empty(0, len(aux), later.primary_TD.shape[1])
        kept = [layer.at(aux_A) for layer in later.kept]
        some = AuxRows(later.tokens_T[aux_A], later.positions_T[aux_A], None, kept)
        positions = [p for s in rows.sequences for p in range(s.start, s.start + s.count)]
        layout = self._layout(rows, positions, [rows.read[i] for i in aux], primary=False)
        none_T = later.tokens_T[:0]
        out = self._model.step(none_T, none_T, self.cache.writers(layout), aux=some)
        assert out.aux_FAD is not None
        return out.aux_FAD

    def _ids(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)

    def _layout(
        self, rows: StepRows, positions: list[int], pins: list[int], primary: bool = True
    ) -> Layout:
        """Places of a pass with auxiliary rows at the primary rows ``pins``; without ``primary``
        those are the only ones.
        """
        total = len(rows.tokens) if primary else 0
        num_flows = self._model.config.num_flows
        pinned: dict[int, list[int]] = {}
        for index, row in enumerate(pins):
            pinned.setdefault(row, []).append(index)
        lanes, first = [], 0
        for sequence in rows.sequences:
            own = range(first, first + sequence.count)
            aux = [
                (total + flow * len(pins) + index, positions[row])
                for row in own
                for index in pinned.get(row, ())
                for flow in range(num_flows)
            ]
            lanes.append(Lanes(sequence.pages, sequence.start, own if primary else range(0), aux))
            first += sequence.count
        write_from = [s.write_from for s in rows.sequences]
        return make_layout(
            lanes, write_from, self.cache.page_size, total, self._device, self._own_keys
        )

    def _read(self, primary_TD: Tensor, aux_FAD: Tensor | None, aux: Sequence[int]) -> Readout:
        """Distributions of the read rows from their last hidden states."""
        count = len(primary_TD)
        q_index = [-1] * count
        for place, row in enumerate(aux):
            q_index[row] = place
        if len(aux) == count and count:
            return self._readout(self._model.log_probs(primary_TD, aux_FAD), q_index)
        if not aux:
            return self._readout(self._alone(primary_TD), q_index)
        rest = [row for row in range(count) if q_index[row] < 0]
        aux_A, rest_A = self._ids(aux), self._ids(rest)
        both = self._model.log_probs(primary_TD[aux_A], aux_FAD)
        alone = self._alone(primary_TD[rest_A])
        order_T = torch.cat([aux_A, rest_A]).argsort()
        r = torch.cat([both.r, alone.r])[order_T]
        p = None
        if both.p is not None and alone.p is not None:
            p = torch.cat([both.p, alone.p])[order_T]
        return self._readout(ReadoutLogProbs(r, p, both.q), q_index)

    def _alone(self, primary_TD: Tensor) -> ReadoutLogProbs:
        """Distributions of rows without auxiliary rows; r is NaN where only those say what r is."""
        if self._model.has_primary_readout:
            return self._model.log_probs(primary_TD, None)
        log_p = log_softmax(self._model.logits(primary_TD))
        p = log_p if self._model.config.variant == "dual" else None
        return ReadoutLogProbs(torch.full_like(log_p, torch.nan), p, None)

    def _readout(self, out: ReadoutLogProbs, q_index: list[int]) -> Readout:
        alpha = None
        if self._mixture and out.p is not None:
            alpha = mixture_alpha(out.p).log.exp().tolist()
        return Readout(out.r, out.p, out.q, q_index, alpha, out.r.argmax(-1).tolist())

    def _merge(self, readout: Readout, more: ReadoutLogProbs, aux: Sequence[int]) -> Readout:
        """``readout`` with the distributions of the rows ``aux`` put in."""
        r = readout.r.clone()  # it may be the primary's own
        r[self._ids(aux)] = more.r
        q_index, first = list(readout.q_index), 0 if readout.q is None else len(readout.q)
        q = more.q if readout.q is None or more.q is None else torch.cat([readout.q, more.q])
        best = list(readout.best)
        for place, (row, token) in enumerate(zip(aux, more.r.argmax(-1).tolist(), strict=True)):
            q_index[row], best[row] = first + place, token
        return Readout(r, readout.p, q, q_index, readout.alpha, best, readout.handle)
