"""From one row of log-probabilities to one request's next token.

The order is fixed: bias and penalties, then masks, temperature, top-k, top-p, min-p
(``penalties``, ``shaping``). Random numbers belong to output positions (``uniforms``), so seeded
tokens depend on the request alone. Everything but a plain arg max is float64 on the CPU.
"""

import functools
import math
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from dualflow.engine.penalties import Penalties
from dualflow.engine.request import RequestError, RequestParams
from dualflow.engine.shaping import Kept, Scores, keep
from dualflow.engine.step_plan import Choice
from dualflow.engine.uniforms import Uniforms

_NUMPY_KNOWS = (torch.float32, torch.float64)


class GrammarState(Protocol):
    """Where one sequence stands in the shape its text must have (``structured``)."""

    def allowed(self, output_ids: Sequence[int]) -> Tensor:
        """Which ids may follow ``output_ids``, bool [V]; read it before the next call."""
        ...

    def accept(self, token_id: int) -> None:
        """Go on by one token."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the last token was the end: nothing may follow."""
        ...


class RequestSampler:
    """Chooses the tokens of one sequence.

    Nothing here depends on how often or in which order positions are computed: what a method
    returns follows from its arguments, ``output_ids`` being what was generated before the position
    in question, guesses included.

    vocab_size:       V, the length of the rows; ids from ``num_real_tokens`` on are padding.
    prompt_ids:       what repetition is counted from.
    stop_ids:         forbidden before ``params.min_tokens``.
    sequence_index:   which of the request's outputs this is; it is added to ``seed``.
    grammar:          state of this sequence alone; None where ``params.structured`` is.

    Raises ``RequestError`` where ids are outside the vocabulary or nothing could be sampled.
    """

    def __init__(
        self,
        params: RequestParams,
        *,
        vocab_size: int,
        num_real_tokens: int,
        prompt_ids: Sequence[int],
        stop_ids: frozenset[int],
        seed: int,
        sequence_index: int = 0,
        grammar: GrammarState | None = None,
    ) -> None:
        _require_known(params, num_real_tokens)
        assert (grammar is not None) == (params.structured is not None)
        self.params = params
        self._size, self._real = vocab_size, num_real_tokens
        self._seed = seed + sequence_index
        self._uniforms = Uniforms(self._seed)
        self._draft_uniforms: dict[str, Uniforms] = {}
        self._penalties = Penalties(params, prompt_ids) if params.penalises else None
        self._grammar = grammar
        self._fixed_mask = _fixed_mask(params, vocab_size, num_real_tokens)
        self._early_mask = None
        if params.min_tokens and stop_ids:
            mask_V = torch.ones(vocab_size, dtype=torch.bool)
            mask_V[sorted(token for token in stop_ids if token < num_real_tokens)] = False
            self._early_mask = mask_V if self._fixed_mask is None else mask_V & self._fixed_mask
            if not self._early_mask.any():
                raise RequestError(
                    f"min_tokens is {params.min_tokens}, but only stop ids are allowed; "
                    "nothing could be sampled before them"
                )

    @property
    def wants_logprobs(self) -> bool:
        """Whether r itself is reported for the tokens of the output."""
        return self.params.logprobs is not None

    @property
    def at_end(self) -> bool:
        """Whether the text has come to the end of its shape, which outranks ``min_tokens``."""
        return self._grammar is not None and self._grammar.ended

    def uniform(self, index: int) -> float:
        """The random number of output position ``index``, in [0, 1)."""
        return self._uniforms[index]

    def draft_uniform(self, index: int, use: Literal["draft", "accept", "residual"]) -> float:
        """A number of the same position for guesses, independent of ``uniform`` and by use."""
        if use not in self._draft_uniforms:
            self._draft_uniforms[use] = Uniforms(self._seed, use)
        return self._draft_uniforms[use][index]

    def choose(self, log_r_V: Tensor, output_ids: Sequence[int], best: int | None = None) -> int:
        """The token that follows ``output_ids``; ``best`` is the row's arg max where known.

        Raises ``ValueError`` where the row is not numbers, ``RequestError`` (one of them) where
        every token is forbidden.
        """
        if not self.params.greedy:
            return self.draw(log_r_V, output_ids, self.uniform(len(output_ids)))
        plain = self._penalties is None and not self.params.masks
        if plain and best is not None and best < self._real:
            return best
        scores_V = self._scores(log_r_V, output_ids)
        token = int(scores_V.argmax())  # the lowest of equals; NaN counts as the largest
        if not math.isfinite(scores_V[token]):
            raise self._nothing_to_choose(output_ids)
        return token

    def draw(self, log_V: Tensor, output_ids: Sequence[int], uniform: float) -> int:
        """The token at quantile ``uniform`` of the shaped ``log_V``, in the order of the ids."""
        return self._kept(log_V, output_ids).at(uniform)

    def shape(self, log_V: Tensor, output_ids: Sequence[int]) -> Tensor:
        """The log-probabilities [V] that tokens are drawn from, normalised, float64 on the CPU.

        Greedy keeps the distribution as penalties and masks leave it: only its maximum counts.
        """
        return torch.from_numpy(self._kept(log_V, output_ids).log_probs(self._size))

    def allowed_mask(self, output_ids: Sequence[int]) -> Tensor | None:
        """Which ids may follow ``output_ids``, bool [V]; None: any. Not to be written to."""
        early = len(output_ids) < self.params.min_tokens
        fixed_V = self._early_mask if early and self._early_mask is not None else self._fixed_mask
        if self._grammar is None:
            return fixed_V
        grammar_V = self._grammar.allowed(output_ids)
        mask_V = grammar_V if fixed_V is None else grammar_V & fixed_V
        if early and not mask_V.any():
            # A grammar at its end allows nothing but the end: that outranks min_tokens.
            return grammar_V if self._fixed_mask is None else grammar_V & self._fixed_mask
        return mask_V

    def accepted(self, token_id: int) -> None:
        """Take note of a token that stands. Work done early: no result depends on it."""
        if self._grammar is not None:
            self._grammar.accept(token_id)

    def describe(
        self,
        token_id: int,
        log_r_V: Tensor,
        log_p_V: Tensor | None = None,
        log_q_V: Tensor | None = None,
        alpha: float | None = None,
        source: Literal["p", "q"] | None = None,
        *,
        top: int | None = None,
    ) -> Choice:
        """What the model thought of ``token_id``, from unshaped rows [V].

        ``top`` most probable tokens beside it; None: as many as ``params.logprobs`` asks for.
        """
        count = (self.params.logprobs if top is None else top) or 0
        best: tuple[tuple[int, float], ...] = ()
        if count:
            values, ids = log_r_V[: self._real].topk(min(count, self._real))
            best = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return Choice(
            token_id,
            float(log_r_V[token_id]),
            None if log_p_V is None else float(log_p_V[token_id]),
            None if log_q_V is None else float(log_q_V[token_id]),
            alpha,
            source,
            best,
        )

    def _kept(self, log_V: Tensor, output_ids: Sequence[int]) -> Kept:
        scores_V = self._scores(log_V, output_ids)
        top = float(scores_V.max())
        if not math.isfinite(top):
            raise self._nothing_to_choose(output_ids)
        return keep(scores_V, top, self.params)

    def _scores(self, log_V: Tensor, output_ids: Sequence[int]) -> Scores:
        """Real ids' scores after bias, penalties and masks; the model's own row where there are
        none, so not to be written to.
        """
        row_V = log_V.detach()[: self._real].cpu()
        scores_V = (row_V if row_V.dtype in _NUMPY_KNOWS else row_V.float()).numpy()
        if self._penalties is not None:
            scores_V = scores_V.astype(np.float64)
            self._penalties.apply_(scores_V, output_ids)
        if self.params.masks:
            mask_V = self.allowed_mask(output_ids)
            if mask_V is not None:
                scores_V = np.where(mask_V[: self._real].numpy(), scores_V, -math.inf)
        return scores_V

    def _nothing_to_choose(self, output_ids: Sequence[int]) -> ValueError:
        mask_V = self.allowed_mask(output_ids)
        if mask_V is not None and not mask_V.any():
            return RequestError(
                "every token is forbidden here: what allowed_ids, min_tokens and the structured "
                "output leave has nothing in common"
            )
        return ValueError(
            "the model's probabilities are not numbers (NaN); "
            "its weights are damaged or overflow this dtype"
        )


def _fixed_mask(params: RequestParams, size: int, real: int) -> Tensor | None:
    """What is allowed at every position, bool [V]: real tokens, and of them ``allowed_ids``."""
    if params.allowed_ids is not None:
        mask_V = torch.zeros(size, dtype=torch.bool)
        mask_V[sorted(params.allowed_ids)] = True
        return mask_V
    return _real_ids(size, real) if real < size else None


@functools.lru_cache(maxsize=8)
def _real_ids(size: int, real: int) -> Tensor:
    """The mask of a padded vocabulary, one for all requests: nobody writes into it."""
    return torch.arange(size) < real


def _require_known(params: RequestParams, real: int) -> None:
    for name in ("logit_bias", "allowed_ids"):
        wrong = [token for token in getattr(params, name) or () if token >= real]
        if wrong:
            raise RequestError(
                f"{name} names the token id {min(wrong)}, but the vocabulary ends at {real - 1}"
            )
