"""What keeps experts evenly used: the load-balancing loss, the z-loss, and the selection bias.

The forward pass gives sums over its rows. Whoever trains adds the counts of all ranks and of the
micro-batches before, and makes the loss from them: f is that of the whole batch so far, and the sum
of P over all parts is that of the whole batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dualflow.model.moe import LayerRouting
from dualflow.ops.experts import expert_counts
from dualflow.spec import ModelConfig


class RouterSums(NamedTuple):
    """Sums over the rows of a pass, for each flow that is balanced (the primary first) and each
    layer with experts.

    scores_FLE:  Σ of each row's scores, which are made to add up to 1.
    counts_FLE:  how many rows chose each expert.
    rows_F:      rows.
    z_F:         Σ over rows and layers of the squared logsumexp of the router's logits.
    """

    scores_FLE: Tensor
    counts_FLE: Tensor
    rows_F: Tensor
    z_F: Tensor


def router_sums(routing: Sequence[LayerRouting], config: ModelConfig) -> RouterSums | None:
    """The sums of one pass; None where no layer has experts.

    The auxiliary is balanced where it chooses for itself and chooses any.
    """
    if not routing or config.moe is None:
        return None
    flows = config.flows
    aux = flows is not None and flows.routing == "independent" and config.aux_experts_per_token > 0
    parts = [[_of_layer(layer, config, is_aux) for layer in routing] for is_aux in (False, aux)]
    kinds = parts if aux else parts[:1]
    stacked = [[torch.stack(column) for column in zip(*kind, strict=True)] for kind in kinds]
    scores, counts, rows, z = (torch.stack(column) for column in zip(*stacked, strict=True))
    return RouterSums(scores, counts, rows[:, 0], z.sum(-1))


def _of_layer(layer: LayerRouting, config: ModelConfig, is_aux: bool) -> tuple[Tensor, ...]:
    assert config.moe is not None
    first = len(layer.primary.experts_XK)
    rows = slice(first, None) if is_aux else slice(None, first)
    chosen = layer.aux if is_aux else layer.primary
    assert chosen is not None
    scores_XE, logits_XE = layer.scores_RE[rows], layer.logits_RE[rows]
    unit_XE = scores_XE / scores_XE.sum(-1, keepdim=True).clamp_min(1e-20)
    return (
        unit_XE.sum(0),
        expert_counts(chosen.experts_XK, config.moe.num_experts),
        torch.tensor(len(scores_XE), device=scores_XE.device),
        logits_XE.logsumexp(-1).square().sum(),
    )


def balance_loss(sums: RouterSums, used_FLE: Tensor, rows_F: Tensor, config: ModelConfig) -> Tensor:
    """The weighted balancing losses of a pass's rows, 0-dim: for each flow the mean over layers of
    E Σ f_e P_e, and the mean squared logsumexp of the router's logits.

    used_FLE:  f, the share of each expert in all choices, as far as the whole batch is known.
    rows_F:    rows of the whole batch: the losses of its passes add up to its own.
    """
    moe = config.moe
    assert moe is not None
    p_FLE = sums.scores_FLE / rows_F[:, None, None]
    balance_F = moe.num_experts * (used_FLE * p_FLE).sum(-1).mean(-1)
    z_F = sums.z_F / (rows_F * sums.scores_FLE.shape[1])
    return moe.balance_weight * balance_F.sum() + moe.z_weight * z_F.sum()


@torch.no_grad()
def move_selection_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> None:
    """One step of ``bias_E`` towards balance: up by ``rate`` where an expert was chosen less often
    than the mean, down where more often; its own mean is kept at 0 (Wang et al. 2024).
    """
    counts_E = counts_E.to(bias_E.dtype)
    step_E = (counts_E.mean() - counts_E).sign() * rate
    bias_E.add_(step_E)
    bias_E.sub_(bias_E.mean())
