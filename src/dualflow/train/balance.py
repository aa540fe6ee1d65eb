"""Keeping experts evenly used over a whole optimizer step: all ranks, and the micro-batches so
far.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dualflow.model import CausalLM
from dualflow.model.balance import RouterSums, balance_loss, move_selection_bias
from dualflow.model.moe import MoE
from dualflow.train.parallel import Parallel

COLLAPSED = 0.05
"""An expert that is chosen more rarely than this part of its even share is as good as lost."""


class ExpertLoad(NamedTuple):
    """How often the most and the least chosen expert of a layer were chosen in a step, relative to
    an even share.
    """

    flow: str
    layer: int
    most: float
    least: float
    least_expert: int


class Balance:
    """The balancing losses of one optimizer step, and the step of the selection biases after it.

    f is known of the micro-batches up to the present one, over all ranks: the first cannot know the
    last. P, and the z-loss, are exactly those of the whole batch. Every row of a batch is a token
    that was read, so that all of them count; prompts of chats too, whose targets do not.
    """

    def __init__(self, model: CausalLM, parallel: Parallel, rows: int) -> None:
        """rows: positions of the global batch."""
        self.config, self._parallel = model.config, parallel
        layers = model.model.layers
        self._mixtures = {i: x.moe for i, x in enumerate(layers) if isinstance(x.moe, MoE)}
        flows = torch.tensor([1, model.config.num_flows], device=parallel.device)
        self._rows_F = rows * flows
        self._counts_FLE: Tensor | None = None

    @property
    def used_FLE(self) -> Tensor | None:
        """The share of each expert in all choices of this step so far, by flow and layer; None:
        nothing was chosen.
        """
        if self._counts_FLE is None:
            return None
        return self._counts_FLE / self._counts_FLE.sum(-1, keepdim=True).clamp_min(1)

    def begin(self) -> None:
        """Forget the step before."""
        self._counts_FLE = None

    def loss(self, sums: RouterSums) -> Tensor:
        """The part of one micro-batch on this rank, as a term of the mean loss."""
        counts_FLE = self._parallel.sum_(sums.counts_FLE.detach().clone())
        self._counts_FLE = counts_FLE if self._counts_FLE is None else self._counts_FLE + counts_FLE
        used_FLE = self.used_FLE
        assert used_FLE is not None
        return balance_loss(sums, used_FLE, self._rows_F[: len(sums.rows_F)], self.config)

    def finish(self) -> None:
        """Move the selection biases by what was chosen in the step."""
        if self._counts_FLE is None or self.config.moe is None:
            return
        for mixture, counts_E in zip(self._mixtures.values(), self._counts_FLE.sum(0), strict=True):
            if mixture.selection_bias is not None:
                bias_E = mixture.selection_bias.weight
                move_selection_bias(bias_E, counts_E, self.config.moe.bias_rate)

    def load(self) -> list[ExpertLoad]:
        """Of every flow that is balanced and every layer, in the step taken last."""
        used_FLE = self.used_FLE
        if used_FLE is None:
            return []
        relative_FLE = (used_FLE * used_FLE.shape[-1]).cpu()
        return [
            ExpertLoad(flow, layer, float(load_E.max()), float(load_E.min()), int(load_E.argmin()))
            for flow, load_LE in zip(("primary", "auxiliary"), relative_FLE, strict=False)
            for layer, load_E in zip(self._mixtures, load_LE, strict=True)
        ]


def record_of(loads: list[ExpertLoad]) -> dict[str, float]:
    """Loads as metrics: ``expert_load_primary_3_max`` is that of layer 3."""
    pairs = {"max": "most", "min": "least"}
    return {
        f"expert_load_{load.flow}_{load.layer}_{name}": round(getattr(load, field), 4)
        for load in loads
        for name, field in pairs.items()
    }


def collapse_warning(loads: list[ExpertLoad]) -> str | None:
    """What to say where a router has all but given an expert up; None: none has."""
    if not loads or (worst := min(loads, key=lambda load: load.least)).least >= COLLAPSED:
        return None
    return (
        f"expert {worst.least_expert} of layer {worst.layer} gets {worst.least:.2f} of an even "
        f"share of the {worst.flow}'s rows: the router is collapsing; raise "
        "model.moe.balance_weight, or set model.moe.selection_bias"
    )
