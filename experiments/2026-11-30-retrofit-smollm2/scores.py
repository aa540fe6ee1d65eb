"""What is kept of each held-out token, and the losses of every readout made of it."""

from typing import NamedTuple

import torch
from torch import Tensor

from dualflow.ops.mixture import Alpha, mix

ROWS = 256
"""Rows whose logits are held at a time."""


class Scores(NamedTuple):
    """One distribution at T tokens, float32, [T] each: log-probability of the target, the
    collision probability Σp², and 1 − Σp².
    """

    log_prob: Tensor
    collision: Tensor
    complement: Tensor

    @property
    def loss(self) -> float:
        """Mean loss in nats per token."""
        return -self.log_prob.double().mean().item()


def scores_of(logits_TV: Tensor, targets_T: Tensor) -> Scores:
    """The scores of rows of logits."""
    log_p_TV = logits_TV.float().log_softmax(-1)
    p_TV = log_p_TV.exp()
    collision, complement = p_TV.square().sum(-1), (p_TV * (1 - p_TV)).sum(-1)
    return Scores(log_p_TV.gather(-1, targets_T[:, None])[:, 0], collision, complement)


def joined(parts: list[Scores]) -> Scores:
    """The scores of several batches behind one another."""
    return Scores(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def mixture_loss(p: Scores, q: Scores) -> float:
    """The paper's α = clip(Σp², ½, 1), as ``dualflow.ops.mixture.mixture_alpha``."""
    tiny = torch.finfo(torch.float32).tiny
    alpha = Alpha(p.collision.clamp(0.5, 1).log(), p.complement.clamp(tiny, 0.5).log())
    return _mixed(alpha, p, q).item()


def learned_loss(p: Scores, q: Scores, weight_3: Tensor) -> Tensor:
    """α = σ(w · [1, logit Σp², logit Σq²]), as ``dualflow.ops.mixture.learned_alpha``; 0-dim."""
    logit = weight_3[0] + weight_3[1] * _logit(p) + weight_3[2] * _logit(q)
    log_sigmoid = torch.nn.functional.logsigmoid
    return _mixed(Alpha(log_sigmoid(logit), log_sigmoid(-logit)), p, q)


def fitted_weight(p: Scores, q: Scores) -> Tensor:
    """The three numbers of a learned α that are best for these tokens."""
    weight_3 = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight_3], max_iter=50, line_search_fn="strong_wolfe")

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = learned_loss(p, q, weight_3)
        loss.backward()
        return loss

    optimizer.step(evaluate)
    return weight_3.detach()


def readouts(p: Scores, q: Scores, weight_3: Tensor) -> dict[str, float]:
    """The loss under every readout."""
    learned = learned_loss(p, q, weight_3).item()
    return {"mixture": mixture_loss(p, q), "aux_only": q.loss, "learned": learned}


def _mixed(alpha: Alpha, p: Scores, q: Scores) -> Tensor:
    return -mix(alpha, p.log_prob, q.log_prob).mean()


def _logit(scores: Scores) -> Tensor:
    tiny = torch.finfo(torch.float32).tiny
    return scores.collision.clamp_min(tiny).log() - scores.complement.clamp_min(tiny).log()
