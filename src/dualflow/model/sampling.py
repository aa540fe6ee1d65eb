"""From the log-probabilities of the next token to a token.

Order and definitions are Hugging Face's: temperature, then top-k, top-p, min-p, each on what the
ones before left. Everything here runs in float64 on the CPU, with one uniform number per token from
the request's own generator: a seed gives the same tokens whatever else runs, and on any device.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the next token. The defaults sample r as it is.

    temperature:  divides the log-probabilities; 0 takes the most probable token (greedy).
    top_k:        keep the k most probable tokens, and those as probable as the k-th; 0: all.
    top_p:        keep the fewest most probable tokens that together reach this probability; 1: all.
    min_p:        keep tokens at least this fraction as probable as the most probable one; 0: all.
    seed:         of the request's own random numbers; None draws one.

    Raises ``ValueError`` naming the field and its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _require_number(
            "temperature", self.temperature, "a finite number from 0 (greedy) up", 0.0, math.inf
        )
        _require_number("top_p", self.top_p, "above 0 and at most 1", 0.0, 1.0, zero=False)
        _require_number("min_p", self.min_p, "from 0 to 1", 0.0, 1.0)
        _require_integer("top_k", self.top_k, "a whole number from 0 (off) up", 2**63)
        if self.seed is not None:
            _require_integer("seed", self.seed, "a whole number from 0 to 2^63 - 1, or none", 2**63)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken, so that nothing is random."""
        return self.temperature == 0


class Sampler:
    """Chooses one request's tokens, one after the other."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def __call__(self, log_probs_V: Tensor) -> int:
        """The next token id, from log-probabilities [V]; ids at -inf are never chosen.

        Raises ``ValueError`` where they are not numbers, as with damaged weights.
        """
        shaped_V = shape_log_probs(log_probs_V, self._params)
        if self._params.greedy:
            return int(shaped_V.argmax())
        uniform = torch.rand((), dtype=torch.float64, generator=self._generator)
        return invert(shaped_V.exp(), float(uniform))


def shape_log_probs(log_probs_V: Tensor, params: SamplingParams) -> Tensor:
    """The log-probabilities [V] to sample from, normalised, float64 on the CPU; -inf is cut off.

    Greedy leaves the distribution as it is: only its maximum counts.
    """
    scores_V = log_probs_V.detach().cpu().double()
    top = scores_V.max()
    if not bool(top.isfinite()):
        raise ValueError(
            "the model's probabilities are not numbers (NaN); "
            "its weights are damaged or overflow this dtype"
        )
    # Measured from the maximum, so that a tiny temperature cannot push every score to -inf.
    scores_V = scores_V - top
    if params.greedy:
        return scores_V.log_softmax(-1)
    scores_V = scores_V / params.temperature
    if 0 < params.top_k < len(scores_V):
        scores_V = _keep(scores_V, scores_V >= scores_V.topk(params.top_k).values[-1])
    if params.top_p < 1:
        scores_V = _keep(scores_V, _nucleus(scores_V, params.top_p))
    if params.min_p > 0:
        probs_V = scores_V.softmax(-1)
        scores_V = _keep(scores_V, probs_V >= params.min_p * probs_V.max())
    return scores_V.log_softmax(-1)


def invert(probs_V: Tensor, uniform: float) -> int:
    """The token at quantile ``uniform`` in [0, 1) of ``probs_V``, in the order of the ids.

    A token of probability zero is never returned.
    """
    cumulative_V = probs_V.cumsum(-1)
    token = int(torch.searchsorted(cumulative_V, uniform * cumulative_V[-1], right=True))
    if token < len(probs_V) and probs_V[token] > 0:
        return token
    return int(probs_V.nonzero()[-1])  # rounding put uniform x total at the total itself


def _nucleus(scores_V: Tensor, top_p: float) -> Tensor:
    """True where top-p keeps a token; of equally probable ones at the edge, the lowest ids."""
    sorted_V, order_V = scores_V.sort(descending=True, stable=True)
    probs_V = sorted_V.softmax(-1)
    kept_V = probs_V.cumsum(-1) - probs_V < top_p
    kept_V[0] = True
    return torch.zeros_like(kept_V).scatter(0, order_V, kept_V)


def _keep(scores_V: Tensor, kept_V: Tensor) -> Tensor:
    return scores_V.masked_fill(~kept_V, -math.inf)


def _require_number(
    name: str, value: float, expected: str, low: float, high: float, zero: bool = True
) -> None:
    number = (
        isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    )
    if not number or not low <= value <= high or (value == 0 and not zero):
        raise ValueError(f"{name} is {value!r}; expected {expected}")


def _require_integer(name: str, value: int, expected: str, end: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < end:
        raise ValueError(f"{name} is {value!r}; expected {expected}")
