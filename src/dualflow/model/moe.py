"""A mixture of experts for both flows: each row's router chooses, and every expert that anyone
chose is multiplied once.

The fan-out belongs to the flow: a primary row goes through ``moe.experts_per_token`` experts in
prefill and in decode, so that a key made by decode is the one that prefill would have made; an
auxiliary row through ``aux.experts_per_token``. Shared experts run for every row.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualflow.model.rows import FanOut, Kept, Rows
from dualflow.ops.activation import mlp_intermediate
from dualflow.ops.experts import (
    Pairs,
    Routing,
    choose_experts,
    expert_counts,
    router_scores,
    weigh,
)
from dualflow.spec import ModelConfig


class LayerRouting(NamedTuple):
    """What the router of one layer did in a step: for the balancing losses, and for counting.

    logits_RE:  of every row, in at least float32; ``scores_RE`` what they became.
    primary, aux: the chosen experts; ``aux`` is None where there were no auxiliary rows.
    """

    logits_RE: Tensor
    scores_RE: Tensor
    primary: Routing
    aux: Routing | None

    @classmethod
    def joined(cls, primary: "LayerRouting", aux: "LayerRouting") -> "LayerRouting":
        """Of a step of primary rows and a later one of auxiliary rows."""
        logits_RE, scores_RE = (torch.cat(pair) for pair in zip(primary[:2], aux[:2], strict=True))
        return cls(logits_RE, scores_RE, primary.primary, aux.aux)


class Routed(NamedTuple):
    """What the routed experts gave to every row, [R, D], and how it came about.

    intermediate_TKF: the primary rows' expert intermediates; None where nothing couples them.
    """

    output_RD: Tensor
    routing: LayerRouting
    intermediate_TKF: Tensor | None


class Experts(nn.Module):
    """The routed experts' matrices, stacked: [E, F, D], and [E, D, F] down."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        count, inner, width = config.moe.num_experts, config.moe.expert_size, config.hidden_size
        self.mlp_kind = config.mlp
        self.gate_proj = nn.Parameter(torch.empty(count, inner, width)) if config.gated else None
        self.up_proj = nn.Parameter(torch.empty(count, inner, width))
        self.down_proj = nn.Parameter(torch.empty(count, width, inner))

    def intermediate(self, x_PD: Tensor, pairs: Pairs) -> Tensor:
        """[P, F] of sorted pairs, after activation and gate."""
        gate_PF = None if self.gate_proj is None else pairs.product(x_PD, self.gate_proj)
        return mlp_intermediate(self.mlp_kind, gate_PF, pairs.product(x_PD, self.up_proj))


def keeps_format(name: str) -> bool:
    """Whether a tensor stays float32 whatever a model is converted to: a selection bias moves by
    steps that 16 bits do not resolve.
    """
    return name.endswith("selection_bias.weight")


class SelectionBias(nn.Module):
    """A bias per expert that only choosing sees; float32 whatever the model is moved to."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(num_experts))
        self.weight: Tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SelectionBias":
        values = self.weight
        super()._apply(fn, recurse)
        if self.weight.dtype != values.dtype:
            self.weight = values.to(self.weight.device)
        return self


class MoE(nn.Module):
    """The experts of one layer: a router, routed experts and, where there is one, the shared
    expert's gate. The shared expert itself is an MLP, which the layer runs as any other.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.moe, self.config = config.moe, config
        self.router = nn.Linear(config.hidden_size, config.moe.num_experts, bias=False)
        self.selection_bias = (
            SelectionBias(config.moe.num_experts) if config.moe.selection_bias else None
        )
        self.experts = Experts(config)
        self.shared_expert_gate = (
            nn.Linear(config.hidden_size, 1, bias=False) if config.moe.shared_gate else None
        )

    def forward(
        self, m_RD: Tensor, rows: Rows, couplings: Sequence[Tensor | None], kept: Kept | None
    ) -> Routed:
        """The routed experts over all rows.

        couplings: [E, F] of every flow that couples expert by expert.
        kept:      of the primary rows, where an earlier step made them.
        """
        scores_RE, logits_RE = self._scores(m_RD)
        fan_out = rows.primary_experts or FanOut(self.moe.experts_per_token)
        primary, aux = self._choose(scores_RE[: rows.num_primary], fan_out), None
        if rows.num_flows:
            aux = self._of_aux(scores_RE[rows.num_primary :], rows, primary, kept)
        groups = [primary] if aux is None else [primary, aux]
        output_RD, inner_TKF = self._mix(m_RD, groups, rows, couplings, kept)
        return Routed(output_RD, LayerRouting(logits_RE, scores_RE, primary, aux), inner_TKF)

    def gated(self, m_RD: Tensor, shared_RD: Tensor) -> Tensor:
        """The shared expert's output as every row takes it."""
        if self.shared_expert_gate is None:
            return shared_RD
        return shared_RD * self.shared_expert_gate(m_RD).sigmoid()

    def _scores(self, m_RD: Tensor) -> tuple[Tensor, Tensor]:
        """Routing is float32 whatever the rest runs in: a rounded tie is another expert."""
        wide = torch.float64 if m_RD.dtype == torch.float64 else torch.float32
        device = "cpu" if m_RD.is_meta else m_RD.device.type
        with torch.autocast(device, enabled=False):
            logits_RE = F.linear(m_RD.to(wide), self.router.weight.to(wide))
        return router_scores(logits_RE, self.moe), logits_RE

    def _choose(self, scores_XE: Tensor, fan_out: FanOut) -> Routing:
        bias_E = None if self.selection_bias is None else self.selection_bias.weight
        return choose_experts(scores_XE, self.moe, fan_out.most, bias_E, fan_out.each_X)

    def _of_aux(
        self, scores_XE: Tensor, rows: Rows, primary: Routing, kept: Kept | None
    ) -> Routing:
        flows = self.config.flows
        if flows is None:  # PHD-2's copies go through as many experts as their originals
            return self._choose(scores_XE, FanOut(self.moe.experts_per_token))
        if flows.routing == "independent":
            fan_out = rows.aux_experts or FanOut(self.config.aux_experts_per_token)
            return self._choose(scores_XE, fan_out)
        experts_AK = rows.pinned(primary.experts_XK) if kept is None else kept.experts
        assert experts_AK is not None
        count_X = None if rows.aux_experts is None else rows.aux_experts.each_X
        return weigh(scores_XE, experts_AK.repeat(rows.num_flows, 1), self.moe, count_X)

    def _mix(
        self,
        m_RD: Tensor,
        groups: Sequence[Routing],
        rows: Rows,
        couplings: Sequence[Tensor | None],
        kept: Kept | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Every chosen expert over the rows that chose it, weighted and summed in the order of the
        choice. Also the primary rows' intermediates, where flows couple them.
        """
        slots = Slots.of(groups)
        order_P = slots.experts_P.argsort(stable=True)
        back_P = order_P.argsort()
        pairs = Pairs(slots.rows_P[order_P], expert_counts(slots.experts_P, self.moe.num_experts))
        u_PF = self.experts.intermediate(m_RD[pairs.rows_P], pairs)
        inner_TKF = None
        if any(vector is not None for vector in couplings):
            u_SF, inner_TKF = _couple(slots.spread(u_PF[back_P]), groups, rows, couplings, kept)
            u_PF = slots.gather(u_SF)[order_P]
        y_PD = pairs.product(u_PF, self.experts.down_proj)[back_P]
        y_SD = slots.spread(y_PD * slots.weights_P[:, None].to(y_PD.dtype))
        blocks = y_SD.split([group.experts_XK.numel() for group in groups])
        sums = [
            block.unflatten(0, group.experts_XK.shape).sum(1)
            for block, group in zip(blocks, groups, strict=True)
        ]
        return torch.cat(sums), inner_TKF


class Slots(NamedTuple):
    """The places (row, choice) of a step, S in all: primary rows first, K places each, then the
    auxiliary rows'. P of them are used.

    used_P:  which; None: all.
    """

    rows_P: Tensor
    experts_P: Tensor
    weights_P: Tensor
    used_P: Tensor | None
    total: int

    @classmethod
    def of(cls, groups: Sequence[Routing]) -> "Slots":
        """The places of groups of rows that follow each other."""
        rows_S, used_S, first = [], [], 0
        for group in groups:
            count, k = group.experts_XK.shape
            numbers_X = torch.arange(first, first + count, device=group.experts_XK.device)
            rows_S.append(numbers_X.repeat_interleave(k))
            used_XK = group.used_XK
            used_S.append(
                torch.ones_like(rows_S[-1], dtype=torch.bool)
                if used_XK is None
                else used_XK.flatten()
            )
            first += count
        rows_P, experts_P, weights_P = (
            torch.cat(rows_S),
            torch.cat([group.experts_XK.flatten() for group in groups]),
            torch.cat([group.weights_XK.flatten() for group in groups]),
        )
        total, used_P = len(rows_P), None
        if any(group.count_X is not None for group in groups):
            used_P = torch.cat(used_S).nonzero()[:, 0]
            rows_P, experts_P, weights_P = rows_P[used_P], experts_P[used_P], weights_P[used_P]
        return cls(rows_P, experts_P, weights_P, used_P, total)

    def spread(self, x_PC: Tensor) -> Tensor:
        """[S, C]: zero at the places that are not used."""
        if self.used_P is None:
            return x_PC
        return x_PC.new_zeros(self.total, x_PC.shape[1]).index_copy(0, self.used_P, x_PC)

    def gather(self, x_SC: Tensor) -> Tensor:
        """[P, C]: the inverse of ``spread``."""
        return x_SC if self.used_P is None else x_SC[self.used_P]


def _couple(
    u_SF: Tensor,
    groups: Sequence[Routing],
    rows: Rows,
    couplings: Sequence[Tensor | None],
    kept: Kept | None,
) -> tuple[Tensor, Tensor]:
    """Under replay, where an auxiliary row's choices are its primary row's: each adds the coupling
    vector of its expert times the primary's intermediate. Returns all places, and the primary's.
    """
    primary = groups[0]
    u1_SF, u2_SF = u_SF.split([primary.experts_XK.numel(), len(u_SF) - primary.experts_XK.numel()])
    u1_TKF = u1_SF.unflatten(0, primary.experts_XK.shape)
    if len(groups) == 1:
        return u_SF, u1_TKF
    pinned_AKF = rows.pinned(u1_TKF) if kept is None else kept.expert_intermediate
    assert pinned_AKF is not None
    experts_AK = groups[1].experts_XK[: len(pinned_AKF)]
    u2_YAKF = u2_SF.unflatten(0, (rows.num_flows, *pinned_AKF.shape[:2]))
    flows = [
        block if vector is None else block + vector.to(block.dtype)[experts_AK] * pinned_AKF
        for vector, block in zip(couplings, u2_YAKF.unbind(0), strict=True)
    ]
    return torch.cat([u1_SF, torch.stack(flows).flatten(0, 2)]), u1_TKF
