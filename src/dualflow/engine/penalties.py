"""Bias, and penalties for tokens that were written before: work for those tokens alone."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from dualflow.engine.request import RequestParams


class Penalties:
    """Applies one request's bias, repetition, presence and frequency penalties, in this order.

    The repetition penalty (Keskar et al. 2019) is defined on logits; what there is here is log r,
    a mixture's log-probabilities, so it multiplies what is negative and divides what a bias made
    positive. It counts the prompt and the output; the other two count the output (OpenAI).
    """

    def __init__(self, params: RequestParams, prompt_ids: Iterable[int]) -> None:
        self._params = params
        self._bias_ids = np.array(list(params.logit_bias), np.int64)
        self._bias = np.array(list(params.logit_bias.values()), np.float64)
        self._seen = _Seen(prompt_ids if params.repetition_penalty != 1 else ())

    def apply_(self, scores_V: NDArray[np.float64], output_ids: Sequence[int]) -> None:
        """Change ``scores_V``, in place, given what was generated so far."""
        params = self._params
        if len(self._bias_ids):
            scores_V[self._bias_ids] += self._bias
        if params.repetition_penalty == 1 and not (
            params.presence_penalty or params.frequency_penalty
        ):
            return
        self._seen.follow(output_ids)
        ids_N, counts_N, seen_N = self._seen.arrays()
        scores_N = scores_V[ids_N]
        if params.repetition_penalty != 1:
            penalty = params.repetition_penalty
            hit_N = np.where(scores_N < 0, scores_N * penalty, scores_N / penalty)
            scores_N = np.where(seen_N, hit_N, scores_N)
        scores_N -= params.frequency_penalty * counts_N
        scores_N -= params.presence_penalty * (counts_N > 0)
        scores_V[ids_N] = scores_N


class _Seen:
    """How often each id was generated, for the ids that were seen at all.

    A list that grows token by token costs one update each; one that shrinks or differs (guesses
    that did not hold) is followed back to where it parts.
    """

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        prompt = sorted(set(prompt_ids))
        self._place = {token: place for place, token in enumerate(prompt)}
        self._num_prompt = len(prompt)
        self._output: list[int] = []
        room = max(64, 2 * len(prompt))
        self._ids = np.zeros(room, np.int64)
        self._ids[: len(prompt)] = prompt
        self._counts = np.zeros(room, np.float64)

    def follow(self, output_ids: Sequence[int]) -> None:
        known = self._output
        shared = common_prefix(known, output_ids)
        while len(known) > shared:
            self._counts[self._place[known.pop()]] -= 1
        for token in output_ids[shared:]:
            place = self._place_of(token)  # before _counts is read: it may be made anew
            self._counts[place] += 1
            known.append(token)

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_]]:
        """Ids, their counts in the output, and whether they stand in prompt or output."""
        size = len(self._place)
        counts = self._counts[:size]
        seen = counts > 0
        seen[: self._num_prompt] = True
        return self._ids[:size], counts, seen

    def _place_of(self, token: int) -> int:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        return place


def common_prefix(known: list[int], now: Sequence[int]) -> int:
    """How many ids at the start of both are the same; quick where ``now`` only adds to it."""
    if list(now[: len(known)]) == known:
        return len(known)
    return next(
        (i for i, (a, b) in enumerate(zip(known, now, strict=False)) if a != b),
        min(len(known), len(now)),
    )
