"""From final hidden rows to the distributions p, q and r."""

from typing import NamedTuple

from torch import Tensor

from dualflow.ops.mixture import (
    Alpha,
    TargetLogProbs,
    at_targets,
    learned_alpha,
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


def read_all(
    readout: ReadoutConfig,
    logits_p_AV: Tensor,
    logits_q_FAV: Tensor,
    alpha_weight: Tensor | None = None,
) -> ReadoutLogProbs:
    """The whole distributions of A rows (``spec.ReadoutConfig`` says how r is made).

    alpha_weight: the three numbers of a ``learned`` readout.
    """
    log_p, log_q = log_softmax(logits_p_AV), mean_over_flows(log_softmax(logits_q_FAV))
    match readout.kind:
        case "mixture" | "learned":
            r = mix(_alpha(readout, log_p, log_q, alpha_weight), log_p, log_q)
            return ReadoutLogProbs(r, log_p, log_q)
        case "aux_only":
            return ReadoutLogProbs(log_q, log_p, log_q)
        case "primary_only":
            return ReadoutLogProbs(log_p, log_p, log_q)


def read_targets(
    readout: ReadoutConfig,
    logits_p_TV: Tensor,
    logits_q_FTV: Tensor,
    targets_T: Tensor,
    alpha_weight: Tensor | None = None,
) -> TargetLogProbs:
    """Log-probability of one target per row under r, p and q; only α needs whole distributions."""
    log_p_TV, log_q_FTV = log_softmax(logits_p_TV), log_softmax(logits_q_FTV)
    log_p = at_targets(log_p_TV, targets_T)
    log_q = mean_over_flows(at_targets(log_q_FTV, targets_T))
    match readout.kind:
        case "mixture" | "learned":
            log_q_TV = mean_over_flows(log_q_FTV) if readout.kind == "learned" else None
            alpha = _alpha(readout, log_p_TV, log_q_TV, alpha_weight)
            return TargetLogProbs(mix(alpha, log_p, log_q), log_p, log_q)
        case "aux_only":
            return TargetLogProbs(log_q, log_p, log_q)
        case "primary_only":
            return TargetLogProbs(log_p, log_p, log_q)


def _alpha(
    readout: ReadoutConfig,
    log_p_TV: Tensor,
    log_q_TV: Tensor | None,
    weight_3: Tensor | None,
) -> Alpha:
    if not readout.alpha_gradient:
        log_p_TV = log_p_TV.detach()
        log_q_TV = None if log_q_TV is None else log_q_TV.detach()
    if readout.kind == "mixture":
        return mixture_alpha(log_p_TV)
    assert log_q_TV is not None and weight_3 is not None
    return learned_alpha(log_p_TV, log_q_TV, weight_3)
