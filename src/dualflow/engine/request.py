"""What is asked of the engine and what comes back, as plain data. No torch.

A *request* is a user's unit; with ``n`` above 1 it becomes n sequences that share their prompt's
pages, and each of those is a ``Request`` of its own to the scheduler.
"""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

FinishReason = Literal["stop", "length", "context", "cache", "abort", "error"]
"""``stop``: a stop id or string; ``length``: max_tokens; ``context``: no positions left in the
model; ``cache``: alone in the cache and still no page left; ``abort``: by the user; ``error``: this
request failed, and says why.
"""

MAX_LOGPROBS = 20
MAX_SEQUENCES = 128
SEED_END = 2**63


class RequestError(ValueError):
    """A request that cannot be served: what is wrong, what was expected, how to mend it."""


@dataclass(frozen=True)
class AuxPolicy:
    """When the auxiliary flow runs at a position whose next token is wanted.

    on:         always: the token comes from r.
    off:        never: the token comes from p, another and usually worse distribution.
    exact:      wherever the result could depend on it: the same distribution as ``on``
                (docs/engine.md).
    threshold:  skipped where α is at least ``threshold``: approximate.
    """

    kind: Literal["on", "off", "exact", "threshold"] = "on"
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("on", "off", "exact", "threshold"):
            raise RequestError(f"aux is {self.kind!r}; expected on, off, exact or threshold=T")
        if (self.kind == "threshold") != (self.threshold is not None):
            raise RequestError("a threshold belongs to aux = 'threshold' and to nothing else")
        if self.threshold is not None and not 0.5 <= self.threshold <= 1:
            raise RequestError(
                f"the aux threshold is {self.threshold!r}; α lies between 0.5 and 1, so expected "
                "a number in that range"
            )

    @classmethod
    def parse(cls, text: str) -> "AuxPolicy":
        """Read ``on``, ``off``, ``exact`` or ``threshold=0.9``."""
        kind, equals, value = text.partition("=")
        if not equals:
            if kind == "threshold":
                raise RequestError("aux is 'threshold'; expected threshold=T, as in threshold=0.9")
            return cls(kind)  # type: ignore[arg-type]
        try:
            return cls(kind, float(value))  # type: ignore[arg-type]
        except ValueError as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"the aux threshold is {value!r}; expected a number") from error

    def __str__(self) -> str:
        return self.kind if self.threshold is None else f"{self.kind}={self.threshold:g}"


@dataclass(frozen=True)
class StructuredOutput:
    """A shape that the text must have: a JSON schema, any JSON, a regular expression, or a grammar
    (EBNF). ``value`` is its source text; "" for ``json``.
    """

    kind: Literal["json_schema", "json", "regex", "grammar"]
    value: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.value, str):
            raise RequestError(
                f"structured output has a {type(self.value).__name__} as its source; "
                "expected a text (json.dumps makes one of a schema)"
            )


@dataclass(frozen=True, kw_only=True)
class RequestParams:
    """How one request is continued. The defaults sample r as it is.

    max_tokens:           new tokens at most; None: as many as the model has positions for.
    min_tokens:           new tokens before any stop id or stop string counts.
    temperature, top_k, top_p, min_p, seed: as ``model.sampling.SamplingParams`` defines them.
    repetition_penalty:   divides positive and multiplies negative logits of tokens in the prompt
                          or the output (Keskar et al. 2019); 1: none.
    presence_penalty, frequency_penalty: subtracted from the log-probability of tokens in the
                          output, once and once per occurrence (OpenAI).
    logit_bias:           added to the log-probability of these ids.
    allowed_ids:          nothing else is ever sampled.
    stop, stop_ids:       texts and ids that end the output; ``ignore_eos`` keeps the tokenizer's
                          end-of-text id from being one of them.
    n:                    how many outputs; output i is sampled with seed + i.
    logprobs:             report each token's log r and that of the most probable tokens (0: of
                          none beside it); prompt_logprobs likewise for the prompt's tokens.
    aux:                  when the auxiliary flow runs.
    drafts:               ``ngram``: guess from what was written before; ``primary``: let the
                          primary guess alone. The output's distribution stays r's.
    num_drafts:           tokens guessed in each step at most.
    priority:             smaller goes first.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_ids: frozenset[int] | None = None
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: StructuredOutput | None = None
    aux: AuxPolicy = field(default_factory=AuxPolicy)
    drafts: Literal["off", "ngram", "primary"] = "off"
    num_drafts: int = 4
    priority: int = 0

    def __post_init__(self) -> None:
        _require_kinds(self)
        _require_integer("max_tokens", self.max_tokens, 1, optional=True)
        _require_integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}"
            )
        _require_number("temperature", self.temperature, 0.0, math.inf, "from 0 (greedy) up")
        _require_integer("top_k", self.top_k, 0, 2**63)
        _require_number("top_p", self.top_p, 0.0, 1.0, "above 0 and at most 1", zero=False)
        _require_number("min_p", self.min_p, 0.0, 1.0, "from 0 to 1")
        _require_number(
            "repetition_penalty", self.repetition_penalty, 0.0, math.inf, "above 0", zero=False
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _require_number(name, getattr(self, name), -2.0, 2.0, "from -2 to 2")
        _require_ids(self)
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise RequestError(f"stop is {self.stop!r}; expected texts that are not empty")
        _require_integer("seed", self.seed, 0, SEED_END, optional=True)
        _require_integer("n", self.n, 1, MAX_SEQUENCES + 1)
        for name in ("logprobs", "prompt_logprobs"):
            _require_integer(name, getattr(self, name), 0, MAX_LOGPROBS + 1, optional=True)
        if self.drafts not in ("off", "ngram", "primary"):
            raise RequestError(f"drafts is {self.drafts!r}; expected off, ngram or primary")
        _require_integer("num_drafts", self.num_drafts, 1, 65)
        _require_integer("priority", self.priority, -(2**31), 2**31)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken, so that nothing is random."""
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        """Whether what was written before, or a bias, changes the distribution."""
        return bool(self.logit_bias) or (
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
        ) != (1.0, 0.0, 0.0)

    @property
    def masks(self) -> bool:
        """Whether some ids can be forbidden at a step."""
        return self.allowed_ids is not None or self.structured is not None or self.min_tokens > 0

    @property
    def reshapes(self) -> bool:
        """Whether the tokens come from anything but the model's own distribution at
        temperature 1.
        """
        cuts = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return self.temperature != 1 or cuts or self.penalises or self.masks


class Status(Enum):
    """Where a request stands with the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One sequence as the scheduler sees it.

    id:            unique among live requests.
    prompt_ids:    at least one.
    max_tokens:    new tokens at most, the model's positions taken into account;
                   ``limit_reason`` says what that limit is.
    stop_ids:      ids that end it, the end-of-text id included where it counts.
    arrival:       a growing number: first come, first served among equal priorities.
    tenant:        whose prefix cache it may read.
    parent:        the sequence of the same user request whose prompt's pages it shares once they
                   are computed; None for the first.
    output_ids:    what was generated so far; preemption keeps it.
    num_computed:  tokens whose keys and values are in ``pages``.
    cached_tokens: prompt tokens that did not have to be computed.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: RequestParams
    max_tokens: int
    limit_reason: FinishReason = "length"
    stop_ids: frozenset[int] = frozenset()
    arrival: int = 0
    tenant: str = ""
    parent: str | None = None
    status: Status = Status.WAITING
    output_ids: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    finish_reason: FinishReason | None = None

    @property
    def length(self) -> int:
        """Tokens known so far: the prompt and what was generated."""
        return len(self.prompt_ids) + len(self.output_ids)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Known tokens of the positions from ``start`` up to ``end``."""
        prompt = len(self.prompt_ids)
        if start >= prompt:
            return tuple(self.output_ids[start - prompt : end - prompt])
        head = self.prompt_ids[start:end]
        return head + tuple(self.output_ids[: end - prompt]) if end > prompt else head


_SEVERAL = (Set, list, tuple)
_KINDS: dict[str, tuple[Any, str]] = {
    "logit_bias": (Mapping, "a mapping from ids to numbers"),
    "allowed_ids": ((*_SEVERAL, type(None)), "a set of ids"),
    "stop": (_SEVERAL, "several texts, such as ('.',)"),
    "stop_ids": (_SEVERAL, "a set of ids"),
    "ignore_eos": (bool, "True or False"),
    "structured": ((StructuredOutput, type(None)), "a StructuredOutput"),
    "aux": (AuxPolicy, "an AuxPolicy, such as AuxPolicy.parse('exact')"),
}


def _require_kinds(params: RequestParams) -> None:
    for name, (kind, expected) in _KINDS.items():
        value = getattr(params, name)
        if not isinstance(value, kind):
            raise RequestError(f"{name} is {value!r}; expected {expected}")


def _require_ids(params: RequestParams) -> None:
    for token, bias in params.logit_bias.items():
        if type(token) is not int or token < 0:
            raise RequestError(f"logit_bias names the token id {token!r}; expected 0 or more")
        _require_number(f"logit_bias of token {token}", bias, -100.0, 100.0, "from -100 to 100")
    if params.allowed_ids is not None and not params.allowed_ids:
        raise RequestError("allowed_ids is empty; nothing could be sampled")
    for name in ("allowed_ids", "stop_ids"):
        for token in getattr(params, name) or ():
            if type(token) is not int or token < 0:
                raise RequestError(f"{name} names the token id {token!r}; expected 0 or more")


def _require_number(
    name: str, value: float, low: float, high: float, expected: str, zero: bool = True
) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = is_number and math.isfinite(value) and low <= value <= high and (zero or value != 0)
    if not fits:
        raise RequestError(f"{name} is {value!r}; expected a number {expected}")


def _require_integer(
    name: str, value: int | None, low: int, end: int | None = None, optional: bool = False
) -> None:
    if value is None and optional:
        return
    if type(value) is not int or value < low or (end is not None and value >= end):
        upper = "up" if end is None else f"to {end - 1}"
        raise RequestError(f"{name} is {value!r}; expected a whole number from {low} {upper}")
