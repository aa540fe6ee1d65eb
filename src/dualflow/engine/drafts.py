"""Guesses of the next tokens from what was written before (prompt look-up). No torch.

Text repeats itself: where the last few tokens have occurred before, what followed them then is
guessed to follow now. A guess costs a row in the next step, and is verified there.
"""

from collections.abc import Iterable, Sequence

MAX_NGRAM = 3
MIN_NGRAM = 2


def propose_ngram(
    tokens: Sequence[int], num_drafts: int, max_n: int = MAX_NGRAM, min_n: int = MIN_NGRAM
) -> tuple[int, ...]:
    """Guess ``num_drafts`` tokens after ``tokens``, or none.

    The longest ending of ``max_n`` down to ``min_n`` tokens that occurred before decides, its
    latest earlier occurrence where there are several. Where what followed runs into the end, the
    guesses themselves are read on: a text of period one goes on with the same token.
    """
    for n in range(min(max_n, len(tokens) - 1), min_n - 1, -1):
        ending = list(tokens[-n:])
        for start in range(len(tokens) - n - 1, -1, -1):
            if list(tokens[start : start + n]) == ending:
                return _continue(tokens, start + n, num_drafts)
    return ()


class NgramIndex:
    """``propose_ngram`` for a growing text, with work that does not grow with its length."""

    def __init__(self, max_n: int = MAX_NGRAM, min_n: int = MIN_NGRAM) -> None:
        self._tokens: list[int] = []
        # For each n: where the last occurrence of an n-gram ends, and the one before it.
        self._ends: dict[int, dict[tuple[int, ...], tuple[int, int]]] = {
            n: {} for n in range(max_n, min_n - 1, -1)
        }

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append ``tokens`` to the text."""
        known = self._tokens
        for token in tokens:
            known.append(token)
            end = len(known)
            for n, ends in self._ends.items():
                if end >= n:
                    ngram = tuple(known[end - n :])
                    before = ends.get(ngram)
                    ends[ngram] = (end, before[0] if before else 0)

    def propose(self, num_drafts: int) -> tuple[int, ...]:
        """Guess ``num_drafts`` tokens, or none."""
        known = self._tokens
        for n, ends in self._ends.items():
            if len(known) > n and (found := ends[tuple(known[-n:])][1]):
                return _continue(known, found, num_drafts)
        return ()


def _continue(tokens: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """``count`` tokens from ``start`` on, the guesses being read as if they stood at the end."""
    period = len(tokens) - start
    return tuple(tokens[start + i % period] for i in range(count))
