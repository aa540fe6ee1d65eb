"""The naive generator, which faster ones are checked against: one request, token by token.

Prefill runs the primary over the prompt, with auxiliary rows at its last position alone; each
decode step runs one primary row and its auxiliary rows. There is one KV cache, the primary's.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from dualflow.model.backbone import CausalLM
from dualflow.model.kv import ContiguousCache
from dualflow.model.readout import ReadoutLogProbs
from dualflow.model.sampling import Sampler, SamplingParams
from dualflow.ops.mixture import mixture_alpha

AuxMode = Literal["on", "off"]
FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True, kw_only=True)
class GenerationParams:
    """What to generate and when to end.

    max_tokens:  new tokens at most; None: as many as the model has positions for.
    sampling:    how each token is chosen.
    stop_ids:    token ids that end the text, such as the tokenizer's end-of-text id; they are
                 reported, and give no text.
    aux:         ``off`` reads p alone: cheaper for each token, another distribution. Refused where
                 there is no trained p.
    """

    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    aux: AuxMode = "on"

    def __post_init__(self) -> None:
        limit = self.max_tokens
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ValueError(f"max_tokens is {limit!r}; expected a whole number from 1 up")
        if self.aux not in ("on", "off"):
            raise ValueError(f"aux is {self.aux!r}; expected 'on' or 'off'")


class Detokenizer(Protocol):
    """What turns ids into text for one request: ``data.detokenize.StreamDetokenizer``."""

    @property
    def stopped(self) -> str | None: ...

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


@dataclass(frozen=True)
class TokenEvent:
    """One new token.

    text:   what it adds to the text; "" where a character or a possible stop string is still
            undecided.
    log_r:  its log-probability under the model's distribution r, before temperature and cuts, in
            nats; ``log_p`` and ``log_q`` likewise, None where the model or the aux mode has no such
            distribution.
    alpha:  the weight of p in r; None unless r is a mixture.
    """

    token_id: int
    text: str
    log_r: float
    log_p: float | None
    log_q: float | None
    alpha: float | None


@dataclass(frozen=True)
class Figures:
    """What a generation took. Seconds are wall-clock, bytes those of the KV cache.

    prefill_seconds:  until the first new token is chosen.
    aux_positions:    positions at which the auxiliary flow ran; all others ran the primary alone.
    """

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    cache_bytes: int
    cache_bytes_allocated: int
    aux_positions: int

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens per second."""
        return _rate(self.prompt_tokens, self.prefill_seconds)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """New tokens per second, the first (prefill's) left out; None: there was no other."""
        return _rate(self.new_tokens - 1, self.decode_seconds)


@dataclass(frozen=True)
class FinishEvent:
    """The end: always the last event.

    text:    what was still held back.
    reason:  ``stop`` (a stop string or stop id), ``length`` (max_tokens), ``context`` (no positions
             left).
    """

    text: str
    reason: FinishReason
    figures: Figures


def generate(
    model: CausalLM,
    prompt_ids: Sequence[int],
    params: GenerationParams | None = None,
    detokenizer: Detokenizer | None = None,
) -> Iterator[TokenEvent | FinishEvent]:
    """Continue ``prompt_ids``, event by event; the call itself raises what is wrong with it.

    A prompt of T tokens leaves room for max_position - T + 1 new ones (the last needs no position
    of its own); a larger ``max_tokens`` is cut to that, and reported as ``context``. An empty text
    is generated from the tokenizer's end-of-text id as the prompt. Nothing is kept between calls,
    so the iterator may be left at any point.

    Raises ``ValueError``: an empty or too long prompt, ids outside the vocabulary, ``aux="off"``
    without a trained p.
    """
    params = params or GenerationParams()
    c = model.config
    if not prompt_ids:
        raise ValueError(
            "the prompt has no tokens; start an empty text from the tokenizer's end-of-text id"
        )
    if len(prompt_ids) > c.max_position:
        raise ValueError(
            f"the prompt has {len(prompt_ids):,} tokens, "
            f"but the model has {c.max_position:,} positions"
        )
    if wrong := [i for i in prompt_ids if not 0 <= i < c.num_real_tokens]:
        raise ValueError(
            f"the prompt has token id {wrong[0]}, "
            f"but the vocabulary ends at {c.num_real_tokens - 1}"
        )
    if params.aux == "off":
        model.require_primary_readout()
    return _events(model, list(prompt_ids), params, detokenizer)


def aux_off_warning(metrics: dict[str, object]) -> str | None:
    """What switching the auxiliary off costs by a model's recorded losses; None: nothing."""
    r, p = metrics.get("val_loss"), metrics.get("val_loss_p")
    if isinstance(r, (int, float)) and isinstance(p, (int, float)) and p > r:
        return (
            "with the auxiliary off this model predicts worse: "
            f"recorded validation loss {p:.4f} (p alone) against {r:.4f} (r, auxiliary on)"
        )
    return None


def _events(
    model: CausalLM,
    prompt_ids: list[int],
    params: GenerationParams,
    detokenizer: Detokenizer | None,
) -> Iterator[TokenEvent | FinishEvent]:
    room = model.config.max_position - len(prompt_ids) + 1
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    sequence = _Sequence(model, len(prompt_ids) + limit - 1, params.aux)
    sampler = Sampler(params.sampling)
    reason: FinishReason = "length" if limit == params.max_tokens else "context"
    seconds: list[float] = []
    fed = prompt_ids
    for _ in range(limit):
        started = time.perf_counter()
        distributions = sequence.advance(fed)
        token = sampler(distributions.r[0])
        seconds.append(time.perf_counter() - started)
        ended = token in params.stop_ids
        text = detokenizer.push(token) if detokenizer and not ended else ""
        yield _token_event(model, token, text, distributions)
        if ended or (detokenizer and detokenizer.stopped is not None):
            reason = "stop"
            break
        fed = [token]
    figures = Figures(
        prompt_tokens=len(prompt_ids), new_tokens=len(seconds), prefill_seconds=seconds[0],
        decode_seconds=sum(seconds[1:]), cache_bytes=sequence.cache.nbytes_used,
        cache_bytes_allocated=sequence.cache.nbytes, aux_positions=sequence.aux_positions,
    )  # fmt: skip
    tail = detokenizer.finish() if detokenizer else ""
    if detokenizer and detokenizer.stopped is not None:
        reason = "stop"
    yield FinishEvent(tail, reason, figures)


class _Sequence:
    """One sequence and its cache."""

    def __init__(self, model: CausalLM, max_length: int, aux: AuxMode) -> None:
        self._model, self._aux = model, aux
        self._device = model.device
        self.cache: ContiguousCache = model.new_cache(max_length)
        self.aux_positions = 0

    # Inference mode must not span a yield: it would stay switched on in the code that consumes the
    # events.
    @torch.inference_mode()
    def advance(self, ids: list[int]) -> ReadoutLogProbs:
        """Append ``ids`` and return the distributions [1, V] of what follows the last of them."""
        tokens_T = torch.tensor(ids, device=self._device)
        positions_T = torch.arange(
            self.cache.length, self.cache.length + len(ids), device=self._device
        )
        pins_A = positions_T.new_tensor([len(ids) - 1]) if self._aux == "on" else None
        out = self._model.step(tokens_T, positions_T, self.cache.writers(), pins_A)
        if out.aux_FAD is not None and len(out.aux_FAD):
            self.aux_positions += 1
        return self._model.log_probs(out.primary_TD[-1:], out.aux_FAD)


def _token_event(model: CausalLM, token: int, text: str, out: ReadoutLogProbs) -> TokenEvent:
    def at(log_probs_AV: Tensor | None) -> float | None:
        return None if log_probs_AV is None else float(log_probs_AV[0, token])

    alpha = None
    if model.config.readout.kind == "mixture" and out.p is not None and out.q is not None:
        alpha = float(mixture_alpha(out.p).log[0].exp())
    return TokenEvent(token, text, float(out.r[0, token]), at(out.p), at(out.q), alpha)


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None
