"""The rows of one forward step: T primary rows, then one block of A auxiliary rows for every
auxiliary flow.

Everything a layer computes is a matrix with R = T + flows x A rows, so each shared matrix is
multiplied once for both flows. Training, prefill, decode, draft verification and the standard
transformer differ in T and A alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Kept(NamedTuple):
    """One layer's primary intermediates at chosen rows: what the couplings of an auxiliary row
    read.
    """

    query: Tensor
    """[A, N*H], before QK-norm and rotation."""
    intermediate: Tensor
    """[A, F], after the activation and gate."""
    output: Tensor
    """[A, D], the MLP's output before the residual add."""
    experts: Tensor | None = None
    """[A, K], the experts of a mixture; None where the layer has none."""
    expert_intermediate: Tensor | None = None
    """[A, K, F], of every one of them, where flows couple it."""

    def at(self, rows: Tensor) -> "Kept":
        """The intermediates of some of the rows."""
        return Kept(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


class FanOut(NamedTuple):
    """How many experts rows go through: at most ``most``, or each its own number of ``each_X``."""

    most: int
    each_X: Tensor | None = None

    def repeat(self, num_flows: int) -> "FanOut":
        """For the rows of several flows, one flow after the other."""
        return self if self.each_X is None else FanOut(self.most, self.each_X.repeat(num_flows))


@dataclass(frozen=True)
class Rows:
    """Where each row of a step sits.

    num_primary:  T.
    num_flows:    auxiliary flows, each with its own block of A rows; 0 where the step has no
                  auxiliary rows.
    positions_R:  absolute position of every row in its sequence.
    pins_A:       the primary row each auxiliary row is pinned to; None: auxiliary row i to primary
                  row i.
    kept:         per layer, the primary's intermediates at the pinned rows, where an earlier step
                  computed them (lazy execution: T may then be 0); None: they are taken from this
                  step's primary rows.
    primary_experts, aux_experts: how many experts the rows of each flow go through where a layer
                  has them, all flows' auxiliary rows one after the other; None: as many as the
                  model was trained with.
    """

    num_primary: int
    num_flows: int
    positions_R: Tensor
    pins_A: Tensor | None = None
    kept: Sequence[Kept] | None = None
    primary_experts: FanOut | None = None
    aux_experts: FanOut | None = None

    def primary(self, x_RC: Tensor) -> Tensor:
        """[T, ...]: the primary's rows."""
        return x_RC[: self.num_primary]

    def aux(self, x_RC: Tensor) -> Tensor:
        """[flows, A, ...]: the auxiliary rows, flow by flow."""
        return x_RC[self.num_primary :].unflatten(0, (self.num_flows, -1))

    def join(self, x_TC: Tensor, x_FAC: Tensor) -> Tensor:
        """The inverse of ``primary`` and ``aux``: [R, ...]."""
        return torch.cat([x_TC, x_FAC.flatten(0, 1)])

    def pinned(self, x_TC: Tensor) -> Tensor:
        """[A, ...]: for every auxiliary row of one flow, its primary row of ``x_TC``."""
        return x_TC if self.pins_A is None else x_TC[self.pins_A]
