"""From final hidden rows to the distributions p, q and r."""

from typing import NamedTuple

from torch import Tensor

from dualflow.ops.mixture import (
    TargetLogProbs,
    at_targets,
    log_softmax,
    mean_over_flows,
    mix,
    mixture_alpha,
)
from dualflow.spec import ReadoutConfig


class ReadoutLogProbs(NamedTuple):
    """Log-probabilities over the vocabulary, [A, V] each; None where the model has no such
    distribution.
    """

    r: Tensor
    p: Tensor | None
    q: Tensor | None


def read_all(readout: ReadoutConfig, logits_p_AV: Tensor, logits_q_FAV: Tensor) -> ReadoutLogProbs:
    """The whole distributions of A rows (``spec.ReadoutConfig`` says how r is made)."""
    log_p, log_q = log_softmax(logits_p_AV), mean_over_flows(log_softmax(logits_q_FAV))
    match readout.kind:
        case "mixture":
            return ReadoutLogProbs(mix(mixture_alpha(log_p), log_p, log_q), log_p, log_q)
        case "aux_only":
            return ReadoutLogProbs(log_q, log_p, log_q)
        case "primary_only":
            return ReadoutLogProbs(log_p, log_p, log_q)


def read_targets(
    readout: ReadoutConfig, logits_p_TV: Tensor, logits_q_FTV: Tensor, targets_T: Tensor
) -> TargetLogProbs:
    """Log-probability of one target per row under r, p and q; only α needs the primary's whole
    distribution.
    """
    log_p_TV = log_softmax(logits_p_TV)
    log_p = at_targets(log_p_TV, targets_T)
    log_q = mean_over_flows(at_targets(log_softmax(logits_q_FTV), targets_T))
    match readout.kind:
        case "mixture":
            alpha = mixture_alpha(log_p_TV if readout.alpha_gradient else log_p_TV.detach())
            return TargetLogProbs(mix(alpha, log_p, log_q), log_p, log_q)
        case "aux_only":
            return TargetLogProbs(log_q, log_p, log_q)
        case "primary_only":
            return TargetLogProbs(log_p, log_p, log_q)
