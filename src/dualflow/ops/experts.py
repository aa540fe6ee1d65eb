"""Routing rows to experts, and the experts' matrices over the rows that chose them."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dualflow.spec import MoEConfig


class Routing(NamedTuple):
    """Which experts each row goes through, best first, and with which weight, [X, K] each.

    count_X:  how many of the K a row uses; None: all of them.
    """

    experts_XK: Tensor
    weights_XK: Tensor
    count_X: Tensor | None = None

    @property
    def used_XK(self) -> Tensor | None:
        """True at the places that are used; None: everywhere."""
        if self.count_X is None:
            return None
        return (
            torch.arange(self.experts_XK.shape[1], device=self.count_X.device)
            < (self.count_X[:, None])
        )


def router_scores(logits_XE: Tensor, moe: MoEConfig) -> Tensor:
    """Scores over all experts, in at least float32 whatever the model's format."""
    wide = logits_XE if logits_XE.dtype == torch.float64 else logits_XE.float()
    return wide.softmax(-1) if moe.scores == "softmax" else wide.sigmoid()


def choose_experts(
    scores_XE: Tensor,
    moe: MoEConfig,
    k: int,
    bias_E: Tensor | None = None,
    count_X: Tensor | None = None,
) -> Routing:
    """The k experts of highest biased score; of equals the one of lower number.

    count_X: a number of experts, at most k, of each row's own.
    """
    choice_XE = scores_XE if bias_E is None else scores_XE + bias_E.to(scores_XE.dtype)
    if moe.num_groups > 1:
        choice_XE = _best_groups(choice_XE, moe)
    experts_XK = choice_XE.argsort(dim=-1, descending=True, stable=True)[:, :k]
    return weigh(scores_XE, experts_XK, moe, count_X)


def weigh(
    scores_XE: Tensor, experts_XK: Tensor, moe: MoEConfig, count_X: Tensor | None = None
) -> Routing:
    """The weights of experts that are chosen already (router replay): each row's own scores."""
    routing = Routing(experts_XK, scores_XE.gather(-1, experts_XK), count_X)
    weights_XK = routing.weights_XK
    if (used_XK := routing.used_XK) is not None:
        weights_XK = weights_XK * used_XK
    if moe.normalise:
        weights_XK = weights_XK / (weights_XK.sum(-1, keepdim=True) + 1e-20)
    return routing._replace(weights_XK=weights_XK * moe.scaling)


def _best_groups(choice_XE: Tensor, moe: MoEConfig) -> Tensor:
    """The choice with all but each row's best groups ruled out."""
    grouped_XGE = choice_XE.unflatten(-1, (moe.num_groups, -1))
    best_XG2 = grouped_XGE.topk(min(2, grouped_XGE.shape[-1]), dim=-1).values
    order_XG = best_XG2.sum(-1).argsort(dim=-1, descending=True, stable=True)
    kept_XG = torch.zeros_like(order_XG, dtype=torch.bool)
    kept_XG.scatter_(-1, order_XG[:, : moe.groups_per_token], True)
    return grouped_XGE.masked_fill(~kept_XG[..., None], -torch.inf).flatten(-2)


class Pairs(NamedTuple):
    """(row, expert) pairs in the order of their experts.

    rows_P:    the row of each pair.
    counts_E:  pairs of each expert.
    """

    rows_P: Tensor
    counts_E: Tensor

    def product(self, x_PI: Tensor, matrices_EOI: Tensor) -> Tensor:
        """Each pair's row times its expert's matrix, [P, O]."""
        if x_PI.is_meta:  # there are shapes alone: a matrix of these sizes for every pair
            return x_PI @ matrices_EOI[0].T
        if torch.is_autocast_enabled(x_PI.device.type):
            x_PI = x_PI.to(torch.get_autocast_dtype(x_PI.device.type))
        matrices_EOI = matrices_EOI.to(x_PI.dtype)
        if not _has_grouped_product(x_PI, matrices_EOI):
            return product_by_loop(x_PI, matrices_EOI, self.counts_E)
        ends_E = self.counts_E.cumsum(0).to(torch.int32)
        return F.grouped_mm(x_PI, matrices_EOI.transpose(1, 2), offs=ends_E)


def _has_grouped_product(x_PI: Tensor, matrices_EOI: Tensor) -> bool:
    """Torch's takes rows of a whole number of 16 bytes, forward and backward, and no float64."""
    sizes = x_PI.shape[1] * x_PI.itemsize, matrices_EOI.shape[1] * x_PI.itemsize
    return x_PI.dtype != torch.float64 and not any(size % 16 for size in sizes)


def product_by_loop(x_PI: Tensor, matrices_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Expert by expert: what ``Pairs.product`` must compute."""
    blocks = x_PI.split(counts_E.tolist())
    return torch.cat([x @ matrix.T for x, matrix in zip(blocks, matrices_EOI, strict=True)])


def expert_counts(experts: Tensor, num_experts: int) -> Tensor:
    """How often each expert is named, [E]; differentiable in nothing, defined on every device."""
    return (experts.reshape(-1, 1) == torch.arange(num_experts, device=experts.device)).sum(0)
