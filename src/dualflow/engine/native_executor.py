"""The fast backend on CPUs: a whole step, both flows in every product, in our kernel library.

It gives what ``TorchExecutor`` gives, to the rounding of its number formats; docs/kernels.md says
how it is built.
"""

import ctypes
import math
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualflow.engine.executor import Readout, StepRows
from dualflow.model import CausalLM
from dualflow.ops.native import library, pack
from dualflow.plan.weights import weight_bytes

_WORTH_SHARING = 4_000_000
"""Bytes of weights below which threads wait for each other longer than they compute."""


def unsupported(model: CausalLM) -> str | None:
    """Why the kernels cannot run ``model`` on this machine; None: they can."""
    weights = model.quantised or str(model.lm_head.weight.dtype).removeprefix("torch.")
    return library.why_missing() or pack.unsupported(model.config, weights)


def _threads(model: CausalLM, asked: int | None) -> int:
    """Threads that are asked for, or as many as torch has; no more than there are cores to run
    them, as each waits for all others many times a step, and one where there is little to share.
    """
    if asked is None and weight_bytes(model.config, "bfloat16").total < _WORTH_SHARING:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(torch.get_num_threads() if asked is None else asked, cores or 1)


@dataclass(slots=True)
class _Later:
    """What ``add_aux`` needs of the step before: how many rows have log q, 1 − α, and whether the
    library still keeps that step's intermediates.
    """

    num_aux: int
    complement: Tensor
    generation: int


class NativeExecutor:
    """``Executor`` over packed weights and a paged cache in the kernel library.

    The readout's tensors are the executor's own: they hold until its next step.

    weights: for the record; the model's matrices are taken in the format they have.
    Raises ``ValueError`` for what the kernels cannot do (see ``unsupported``), ``MemoryError``.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        num_pages: int,
        page_size: int = 32,
        kv_dtype: str = "bfloat16",
        weights: str | None = None,
        threads: int | None = None,
    ) -> None:
        reason = unsupported(model)
        if reason is None and kv_dtype not in ("float32", "bfloat16", "int8"):
            reason = f"the cache is {kv_dtype}; the kernels take float32, bfloat16 and int8"
        if reason is not None:
            raise ValueError(f"the kernel library cannot run this model: {reason}")
        self.config, self.page_size = model.config, page_size
        packer = pack.Packer()
        self._threads, self._process = _threads(model, threads), os.getpid()
        spec = pack.model_spec(
            model, packer, num_pages=num_pages, page_size=page_size, kv_dtype=kv_dtype,
            threads=self._threads,
        )  # fmt: skip
        self._kernels, self._handle = pack.new_model(spec)
        self._tensors = packer.kept
        self._mixture = self.config.variant == "dual" and self.config.readout.kind == "mixture"
        self._generation = 0
        self._rooms: dict[str, Tensor] = {}

    def __del__(self) -> None:
        if getattr(self, "_handle", None) and self._has_its_threads:
            self._kernels.df_model_free(self._handle)
            self._handle = None

    @property
    def _has_its_threads(self) -> bool:
        """False in a fork of the process that made it: whoever waited for them waited for ever."""
        return self._threads == 1 or os.getpid() == self._process

    @property
    def cache_bytes(self) -> int:
        """Bytes of the whole paged cache."""
        return self._kernels.df_model_cache_bytes(self._handle)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed matrices; embeddings are read where the model has them."""
        return self._kernels.df_model_weight_bytes(self._handle)

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, source to target, in every layer."""
        for source, target in copies:
            self._kernels.df_copy_page(self._handle, source, target)

    def step(self, rows: StepRows) -> Readout:
        """Run primary and auxiliary rows in one pass (grouped)."""
        if not self._has_its_threads:
            raise RuntimeError(
                "the kernels' threads are in the process that made this engine, and this is a fork "
                "of that; make the engine here, or set threads to 1"
            )
        positions: list[int] = []
        slots: list[int] = []
        size = self.page_size
        for s in rows.sequences:
            end = s.start + s.count
            positions += range(s.start, end)
            slots += [
                s.pages[p // size] * size + p % size if p >= s.write_from else -1
                for p in range(s.start, end)
            ]
        pins = [rows.read[i] for i in rows.aux] if self.config.num_flows else []
        q_index = [-1] * len(rows.read)
        for place, index in enumerate(rows.aux if pins else ()):
            q_index[index] = place
        complement = self._room("complement", len(rows.read))
        readout = self._empty_readout(rows, q_index, len(pins))
        best = array("i", bytes(4 * len(rows.read)))
        alpha = self._room("alpha", len(rows.read))
        self._run(
            rows, best=best, tokens=rows.tokens, positions=positions, slots=slots,
            aux_tokens=[rows.tokens[p] for p in pins], aux_positions=[positions[p] for p in pins],
            aux_pins=pins, counts=[s.count for s in rows.sequences], aux_rows=pins,
            aux_of_read=q_index, keep=rows.keep, readout=readout, first_q=0, alpha=alpha,
            complement=complement,
        )  # fmt: skip
        self._generation += 1  # the tensors of readouts before are used again
        if rows.keep:
            readout.handle = _Later(len(pins), complement, self._generation)
        readout.alpha = alpha.tolist() if self._mixture else None
        return self._finish(readout, best)

    def add_aux(self, rows: StepRows, readout: Readout, aux: Sequence[int]) -> Readout:
        """Run auxiliary rows for more of the read rows (indexes into ``read``) in a pass of their
        own, from what ``step`` kept (lazy): the readout that grouped execution would have given.
        """
        later = readout.handle
        if not isinstance(later, _Later) or later.generation != self._generation:
            raise ValueError("this step kept nothing for later auxiliary rows; set keep")
        if not aux or not self.config.num_flows:
            return readout
        if any(readout.q_index[i] >= 0 for i in aux):
            raise ValueError(f"some of the rows {list(aux)} have auxiliary rows already")
        positions = [p for s in rows.sequences for p in range(s.start, s.start + s.count)]
        pins = [rows.read[i] for i in aux]
        places = [-1] * len(rows.read)
        for place, index in enumerate(aux):
            places[index] = place
            readout.q_index[index] = later.num_aux + place
        best = array("i", readout.best)
        readout.q = self._rooms["q"][: later.num_aux + len(aux)]
        self._run(
            rows, best=best, tokens=(), positions=(), slots=(),
            aux_tokens=[rows.tokens[p] for p in pins], aux_positions=[positions[p] for p in pins],
            aux_pins=aux, counts=[0] * len(rows.sequences), aux_rows=pins, aux_of_read=places,
            keep=False, readout=readout, first_q=later.num_aux, alpha=self._rooms["alpha"],
            complement=later.complement,
        )  # fmt: skip
        later.num_aux += len(aux)
        return self._finish(readout, best, aux)

    def _run(
        self, rows: StepRows, *, best: array, tokens: Sequence[int], positions: Sequence[int],
        slots: Sequence[int], aux_tokens: Sequence[int], aux_positions: Sequence[int],
        aux_pins: Sequence[int], counts: Sequence[int], aux_rows: Sequence[int],
        aux_of_read: Sequence[int], keep: bool, readout: Readout, first_q: int, alpha: Tensor,
        complement: Tensor,
    ) -> None:  # fmt: skip
        """One call of the library. ``aux_rows`` are the primary rows of the auxiliary rows."""
        pages, begins, row_ends, aux_ends = [], [0], [], []
        first = done = row = 0
        for sequence, count in zip(rows.sequences, counts, strict=True):
            first += sequence.count
            while done < len(aux_rows) and aux_rows[done] < first:
                done += 1
            row += count
            row_ends.append(row)
            aux_ends.append(done)
            pages += sequence.pages
            begins.append(len(pages))
        fields = {
            "token": tokens, "position": positions, "slot": slots, "aux_token": aux_tokens,
            "aux_position": aux_positions, "aux_pin": aux_pins, "row_end": row_ends,
            "aux_end": aux_ends, "page": pages, "page_begin": begins, "read": rows.read,
            "aux_of_read": aux_of_read,
        }  # fmt: skip
        arrays = {name: array("i", values) for name, values in fields.items()}
        step = library.Step(
            tokens=len(tokens), aux=len(aux_tokens), sequences=len(rows.sequences),
            reads=len(rows.read), keep=keep,
            **{name: values.buffer_info()[0] for name, values in arrays.items()},
        )  # fmt: skip
        if rows.read:
            assert readout.p is not None
            step.log_p, step.log_r = readout.p.data_ptr(), readout.r.data_ptr()
            step.alpha, step.complement = alpha.data_ptr(), complement.data_ptr()
            step.sureness = self._room("sureness", len(rows.read)).data_ptr()
            step.best = best.buffer_info()[0]
        if readout.q is not None and aux_tokens:
            step.log_q = readout.q[first_q:].data_ptr()
        self._kernels.df_step(self._handle, ctypes.byref(step))

    def _empty_readout(self, rows: StepRows, q_index: list[int], num_aux: int) -> Readout:
        reads, vocab = len(rows.read), self.config.vocab_size
        q = None
        if self.config.num_flows:
            room = self._room("q", max(num_aux, reads if rows.keep else 0), vocab)
            q = room[:num_aux] if num_aux else None
        p, r = self._room("p", reads, vocab), self._room("r", reads, vocab)
        return Readout(r=r, p=p, q=q, q_index=q_index, alpha=None, best=[])

    def _room(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape that is used again in the next step."""
        room = self._rooms.get(name)
        if room is None or len(room) < shape[0]:
            room = self._rooms[name] = torch.empty(max(8, 2 * shape[0]), *shape[1:])
        return room[: shape[0]]

    def _finish(self, readout: Readout, best: array, only: Sequence[int] | None = None) -> Readout:
        readout.best = best.tolist()
        size = self.config.num_real_tokens
        if size < self.config.vocab_size:
            changed = range(len(readout.best)) if only is None else only
            for row in changed:
                r_V = readout.r[row]
                r_V[size:] = -math.inf
                r_V -= r_V.logsumexp(0)
                readout.best[row] = int(r_V.argmax())
        return readout
