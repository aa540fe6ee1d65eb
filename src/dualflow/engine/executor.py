"""What a backend computes: the rows of one step against the paged cache, down to distributions.

``torch_executor`` is the reference, for every model and device; ``native_executor`` runs the same
step in our kernel library. A runner works with either.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Primary rows of one sequence: ``count`` rows from absolute position ``start``; ``pages``
    holds their keys and all before. Rows below position ``write_from`` are not written.
    """

    start: int
    count: int
    pages: Sequence[int]
    write_from: int


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step.

    tokens:     T ids, sequence after sequence.
    sequences:  whose they are.
    read:       primary rows, ascending, whose distribution is wanted.
    aux:        indexes into ``read``, ascending: the rows that get auxiliary rows in this pass.
    keep:       keep the intermediates of the read rows, so that ``Executor.add_aux`` may follow.
    """

    tokens: Sequence[int]
    sequences: Sequence[SequenceRows]
    read: Sequence[int]
    aux: Sequence[int]
    keep: bool = False


@dataclass(slots=True)
class Readout:
    """Distributions of the read rows, in natural logarithms, [rows, V] each.

    r:      what is sampled: the mixture where the row has an auxiliary row, else p.
    p:      the primary's; None where the model has none (aux_only readouts may leave it out).
    q:      of the rows with auxiliary rows alone; ``q_index[i]`` is row i's place in it, -1: none.
    alpha:  weight of p in r for every read row, from p alone; None unless r is a mixture.
    best:   the id of the largest r of every row, the lowest among equals.
    handle: what the executor needs for ``add_aux``.
    """

    r: Tensor
    p: Tensor | None
    q: Tensor | None
    q_index: list[int]
    alpha: list[float] | None
    best: list[int]
    handle: Any = field(default=None, repr=False)


class Executor(Protocol):
    """A model and its paged cache on one backend."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of the whole paged cache."""
        ...

    def step(self, rows: StepRows) -> Readout:
        """Run primary and auxiliary rows in one pass (grouped)."""
        ...

    def add_aux(self, rows: StepRows, readout: Readout, aux: Sequence[int]) -> Readout:
        """Run auxiliary rows for more of the read rows (indexes into ``read``) in a pass of their
        own, from what ``step`` kept (lazy): the readout that grouped execution would have given.
        """
        ...

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, source to target, in every layer."""
        ...
