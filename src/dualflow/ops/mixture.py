"""The readout r = α p + (1 − α) q and the likelihood of targets under it, in row chunks.

α = clip(Σ_v p_v², ½, 1) is the primary's collision probability (paper), or learned (ours). All is
float32 (float64 for float64 inputs) whatever the matmuls run in.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS_PER_CHUNK = 2**22
"""Logits of one flow that a chunk of rows may hold: 16 MiB in float32."""


class TargetLogProbs(NamedTuple):
    """Log-probability of each row's target, [T] each; None where the model has no such
    distribution.
    """

    r: Tensor
    p: Tensor | None
    q: Tensor | None


class Alpha(NamedTuple):
    """log α and log(1 − α) of each row."""

    log: Tensor
    log_complement: Tensor


def mixture_alpha(log_p_TV: Tensor) -> Alpha:
    """α of every row from the primary's log-probabilities; 1 − α is Σp(1 − p), which does not
    cancel near one-hot p.
    """
    collision, complement = _collision(log_p_TV)
    tiny = torch.finfo(log_p_TV.dtype).tiny
    return Alpha(collision.clamp(0.5, 1.0).log(), complement.clamp(tiny, 0.5).log())


def _collision(log_p_TV: Tensor) -> tuple[Tensor, Tensor]:
    """Σp² and Σp(1 − p). In float32 the p of a large vocabulary add up to 1 within some 1e-5 only;
    divided by their sum, the two parts of a mixture of p with itself give p again.
    """
    p_TV = log_p_TV.exp()
    collision, complement = p_TV.square().sum(-1), (p_TV * (1 - p_TV)).sum(-1)
    total = collision + complement
    return collision / total, complement / total


def learned_alpha(log_p_TV: Tensor, log_q_TV: Tensor, weight_3: Tensor) -> Alpha:
    """α = σ(w0 + w1 logit Σp² + w2 logit Σq²) of every row: how sure the flows are decides
    (ours).
    """
    w = weight_3.to(log_p_TV.dtype)
    logit = w[0] + w[1] * _collision_logit(log_p_TV) + w[2] * _collision_logit(log_q_TV)
    return Alpha(F.logsigmoid(logit), F.logsigmoid(-logit))


def _collision_logit(log_p_TV: Tensor) -> Tensor:
    collision, complement = _collision(log_p_TV)
    tiny = torch.finfo(log_p_TV.dtype).tiny
    return collision.clamp_min(tiny).log() - complement.clamp_min(tiny).log()


def mix(alpha: Alpha, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Log r for shapes [T] or [T, V]."""
    if log_p.dim() > alpha.log.dim():
        alpha = Alpha(alpha.log[:, None], alpha.log_complement[:, None])
    return torch.logaddexp(alpha.log + log_p, alpha.log_complement + log_q)


def mean_over_flows(log_q_FT: Tensor) -> Tensor:
    """Log of the flows' uniform mean in probability, over the first axis."""
    if len(log_q_FT) == 1:
        return log_q_FT[0]
    return log_q_FT.logsumexp(0) - torch.log(log_q_FT.new_tensor(float(len(log_q_FT))))


def log_softmax(logits_TV: Tensor) -> Tensor:
    """Log-softmax in at least float32."""
    dtype = torch.float64 if logits_TV.dtype == torch.float64 else torch.float32
    return logits_TV.log_softmax(-1, dtype=dtype)


def at_targets(log_probs: Tensor, targets_T: Tensor) -> Tensor:
    """[..., T]: the entries of [..., T, V] that the targets name."""
    index = targets_T.expand(log_probs.shape[:-1])[..., None]
    return log_probs.gather(-1, index)[..., 0]


def sum_over_chunks(
    score: Callable[[Tensor, Tensor, Tensor], TargetLogProbs],
    primary_TD: Tensor,
    aux_FTD: Tensor,
    targets_T: Tensor,
    vocab_size: int,
) -> TargetLogProbs:
    """Negative log-likelihoods (nats) of the counted targets, summed, without ever holding all
    logits at once.

    ``score`` turns a chunk of hidden rows (primary [t, D], auxiliary [F, t, D]) and targets [t]
    into log-probabilities; its logits live for one chunk only and are recomputed in the backward
    pass where there is more than one chunk. Targets below 0 are not counted. Returns 0-dim sums.
    """
    counted = targets_T >= 0
    targets = targets_T.clamp_min(0)

    def chunk_sums(primary: Tensor, aux: Tensor, target: Tensor, weight: Tensor) -> TargetLogProbs:
        scores = score(primary, aux, target)
        return TargetLogProbs(*(None if s is None else -(s * weight).sum() for s in scores))  # type: ignore[arg-type]

    rows = max(1, LOGITS_PER_CHUNK // vocab_size)
    if len(targets) <= rows:
        return chunk_sums(primary_TD, aux_FTD, targets, counted)
    sums = [
        checkpoint(chunk_sums, *chunk, use_reentrant=False)
        for chunk in zip(
            primary_TD.split(rows),
            aux_FTD.split(rows, 1),
            targets.split(rows),
            counted.split(rows),
            strict=True,
        )
    ]
    columns = zip(*sums, strict=True)
    return TargetLogProbs(*(None if c[0] is None else torch.stack(c).sum() for c in columns))  # type: ignore[arg-type]
