"""Temperature and cuts over a large vocabulary, sorting only what can matter.

The definitions are those of ``model.sampling.shape_log_probs``, in float64 as there, and the tests
compare the two. What differs is the work: a cut first finds the few tokens that can pass it, by
comparisons alone, and then decides among those exactly. NumPy, because its comparisons and
selections take a fraction of torch's time on one thread.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dualflow.engine.request import RequestParams

Scores = NDArray[Any]
"""Log-probabilities up to a constant, float32 or float64."""
Weights = NDArray[np.float64]
"""Probabilities up to a factor."""
Places = NDArray[np.int64]

_BLOCK = 256
"""Tokens summed at a time: only the block that holds the drawn token is summed one by one."""

_FOLD = 64
"""Tokens of which only the largest is looked at when the k-th largest of all is bounded."""

_SORTED, _TRIES = 1024, 24
"""Where top-p stops narrowing down its edge: so few weights left, or so many floors tried."""


class Kept(NamedTuple):
    """The tokens that may be sampled.

    scores_N:   log-probabilities after temperature, up to a constant; the largest is 0.
    weights_N:  their exponentials.
    ids_N:      whose they are, ascending; None: token i's is the i-th.
    """

    scores_N: NDArray[np.float64]
    weights_N: Weights
    ids_N: Places | None

    def at(self, uniform: float) -> int:
        """The token at quantile ``uniform`` in [0, 1), in the order of the ids."""
        place = quantile(self.weights_N, uniform)
        return place if self.ids_N is None else int(self.ids_N[place])

    def only(self, places: Places) -> "Kept":
        """The tokens at ``places``, ascending."""
        ids_N = places if self.ids_N is None else self.ids_N[places]
        return Kept(self.scores_N[places], self.weights_N[places], ids_N)

    def log_probs(self, size: int) -> NDArray[np.float64]:
        """Normalised log-probabilities [size]; -inf where a token was cut off."""
        out_V = np.full(size, -math.inf)
        log_probs_N = self.scores_N - math.log(self.weights_N.sum())
        if self.ids_N is None:
            out_V[: len(log_probs_N)] = log_probs_N
        else:
            out_V[self.ids_N] = log_probs_N
        return out_V


def keep(scores_V: Scores, top: float, params: RequestParams) -> Kept:
    """Temperature, then top-k, top-p and min-p, each on what the ones before left.

    ``top``, finite, is the largest of ``scores_V``. Greedy neither scales nor cuts.
    """
    if params.greedy:
        scores_V = _from_top(scores_V, top)
        return Kept(scores_V, np.exp(scores_V), None)
    ids_N = None
    if 0 < params.top_k < len(scores_V):
        ids_N = _largest(scores_V, params.top_k)
        scores_V = scores_V[ids_N]
    scores_N = _from_top(scores_V, top)
    if params.temperature != 1:
        scores_N /= params.temperature
    if ids_N is not None:
        limit = np.partition(scores_N, -params.top_k)[-params.top_k]
        kept_N = scores_N >= limit
        scores_N, ids_N = scores_N[kept_N], ids_N[kept_N]
    kept = Kept(scores_N, np.exp(scores_N), ids_N)
    if params.top_p < 1:
        kept = kept.only(_nucleus(kept.scores_N, kept.weights_N, params.top_p))
    if params.min_p > 0:  # the largest weight is 1
        kept = kept.only((kept.weights_N >= params.min_p).nonzero()[0])
    return kept


def quantile(weights_N: Weights, uniform: float) -> int:
    """The place at quantile ``uniform`` in [0, 1) of weights that need not be normalised.

    What ``model.sampling.invert`` gives. A place of weight zero is never returned.
    """
    ends = np.add.reduceat(weights_N, np.arange(0, len(weights_N), _BLOCK)).cumsum()
    target = uniform * ends[-1]
    block = int(ends.searchsorted(target, side="right"))
    if block == len(ends):  # rounding put uniform x total at the total itself
        return int(weights_N.nonzero()[0][-1])
    within = weights_N[block * _BLOCK : (block + 1) * _BLOCK]
    if block:
        target -= ends[block - 1]
    place = int(within.cumsum().searchsorted(target, side="right"))
    if place == len(within):  # the block's sum, in another order, was a hair larger
        place = int(within.nonzero()[0][-1])
    return block * _BLOCK + place


def _from_top(scores_N: Scores, top: float) -> NDArray[np.float64]:
    """A copy measured from the maximum: no temperature, tiny as it be, pushes all to -inf."""
    scores_N = scores_N.astype(np.float64)
    scores_N -= top
    return scores_N


def _largest(scores_V: Scores, count: int) -> Places:
    """Ids, ascending, among which are the ``count`` largest scores and all that equal the last.

    Folded into groups, the count-th largest of the groups' maxima is a bound that at least
    ``count`` scores reach, and few others do.
    """
    groups = len(scores_V) // _FOLD
    if count > groups:
        return np.arange(len(scores_V))
    maxima = scores_V[: groups * _FOLD].reshape(_FOLD, groups).max(0)
    return np.flatnonzero(scores_V >= np.partition(maxima, -count)[-count])


def _nucleus(scores_N: NDArray[np.float64], weights_N: Weights, top_p: float) -> Places:
    """Places, ascending, that top-p keeps; of equal scores at its edge, the first.

    Floors, bisecting the logarithm, part the weights into those that are in, those that are out,
    and a middle that is small enough to sort. The largest weight is 1.
    """
    total = float(weights_N.sum())
    wanted, slack = top_p * total, 1e-9 * total
    inside_N = np.zeros(len(weights_N), np.bool_)
    places, middle_N, held = None, weights_N, 0.0
    # Weights up to (1 - top_p) / N of the total hold less than 1 - top_p together.
    low, high = (1 - top_p) * total / len(weights_N), 1.0
    floor = max(low, min(1e-3 * total, 0.1))
    for _ in range(_TRIES):
        if len(middle_N) <= _SORTED:
            break
        above = middle_N > floor
        chosen = above.nonzero()[0]
        chosen_N = middle_N[chosen]
        mass = held + float(chosen_N.sum())
        if abs(mass - wanted) <= slack:  # too close to call from sums in another order
            break
        if mass > wanted:
            low = floor
        else:
            high, held = floor, mass
            inside_N[chosen if places is None else places[chosen]] = True
            chosen = (~above).nonzero()[0]
            chosen_N = middle_N[chosen]
        places = chosen if places is None else places[chosen]
        middle_N = chosen_N
        floor = math.sqrt(low * high)
    # By score: where weights are so close that they round to one, scores may still differ.
    order = np.argsort(-(scores_N if places is None else scores_N[places]), kind="stable")
    sorted_N = middle_N[order]
    kept_N = held + sorted_N.cumsum() - sorted_N < wanted
    kept_N[0] |= held == 0
    last = order[kept_N]
    inside_N[last if places is None else places[last]] = True
    return inside_N.nonzero()[0]
