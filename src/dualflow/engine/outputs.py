"""What an engine hands out: events as they happen, and whole outputs made from them. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dualflow.engine.request import FinishReason
from dualflow.engine.step_plan import Choice


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """Log-probabilities of the prompt's own tokens from the second on, where asked for; comes
    before the first new token.
    """

    request_id: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One new token of output ``index``.

    text: what it adds to the text; "" where a character or a possible stop string is still
          undecided, and for a stop id.
    """

    request_id: str
    index: int
    choice: Choice
    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    """What one output took. Seconds are wall-clock.

    cached_tokens:   prompt tokens that did not have to be computed.
    new_tokens:      tokens generated, a stop id included.
    aux_positions:   positions at which the auxiliary flow ran.
    drafted, accepted: tokens guessed, and how many of the guesses held.
    preemptions:     how often it lost its pages to others and was computed again.
    first_token_seconds: from its arrival to its first token; None: there was none.
    seconds:         from its arrival to its end.
    """

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    aux_positions: int
    drafted: int
    accepted: int
    preemptions: int
    first_token_seconds: float | None
    seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens per second, the first one left out; None: there was no other."""
        first = self.first_token_seconds
        if self.new_tokens < 2 or first is None or self.seconds <= first:
            return None
        return (self.new_tokens - 1) / (self.seconds - first)


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The end of output ``index``: its last event.

    text:   what was still held back.
    stop:   the stop string that ended it, if one did.
    error:  why this request failed, with the reason ``error``.
    last:   whether all outputs of the request have ended with it.
    """

    request_id: str
    index: int
    text: str
    reason: FinishReason
    usage: Usage
    stop: str | None = None
    error: str | None = None
    last: bool = True


Event = PromptEvent | TokenEvent | FinishEvent


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """One whole output of a request. ``choices`` are its tokens with what the model thought of
    each; ``text`` is without stop string and stop id.
    """

    index: int
    text: str
    choices: tuple[Choice, ...]
    finish_reason: FinishReason
    usage: Usage
    stop: str | None = None
    error: str | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of ``choices``."""
        return tuple(choice.token_id for choice in self.choices)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All outputs of a request, by index.

    prompt:          as it was given; None where it was given as ids.
    prompt_choices:  the prompt's tokens from the second on, where prompt_logprobs asked for them.
    """

    request_id: str
    prompt: str | None
    prompt_ids: tuple[int, ...]
    outputs: tuple[SequenceOutput, ...]
    prompt_choices: tuple[Choice, ...] | None = None

    @property
    def text(self) -> str:
        """The text of the first output."""
        return self.outputs[0].text


@dataclass(eq=False)
class OutputCollector:
    """Puts the events of one request together."""

    request_id: str
    prompt: str | None
    prompt_ids: tuple[int, ...]
    finished: bool = False
    _prompt_choices: tuple[Choice, ...] | None = None
    _choices: dict[int, list[Choice]] = field(default_factory=dict)
    _texts: dict[int, list[str]] = field(default_factory=dict)
    _ends: dict[int, FinishEvent] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Take the next event."""
        if isinstance(event, PromptEvent):
            self._prompt_choices = event.choices
            return
        self._texts.setdefault(event.index, []).append(event.text)
        if isinstance(event, TokenEvent):
            self._choices.setdefault(event.index, []).append(event.choice)
        else:
            self._ends[event.index] = event
            self.finished = event.last

    def output(self) -> RequestOutput:
        """The whole, once ``finished``."""
        assert self.finished, f"{self.request_id} has not ended"
        outputs = tuple(self._sequence(end) for _, end in sorted(self._ends.items()))
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_ids, outputs, self._prompt_choices
        )

    def _sequence(self, end: FinishEvent) -> SequenceOutput:
        return SequenceOutput(
            index=end.index,
            text="".join(self._texts[end.index]),
            choices=tuple(self._choices.get(end.index, ())),
            finish_reason=end.reason,
            usage=end.usage,
            stop=end.stop,
            error=end.error,
        )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine's state now, and its counts since it was made, which never go down.

    waiting, running: outputs.
    pages_free, pages_cached, pages_used: of the cache; ``cached`` ones are kept for prompts that
                      begin alike, and are given away when room is short.
    cache_bytes:      of the whole cache.
    prefix_hits, prefix_queries: prompt tokens found in the prefix cache, and looked for.
    steps:            model steps by execution (``StepResult.execution``).
    finished:         outputs by their reason.
    prompt_tokens, cached_tokens: of finished outputs.
    new_tokens:       generated so far.
    computed_tokens:  primary rows computed so far.
    aux_positions:    positions at which the auxiliary flow ran so far.
    """

    waiting: int
    running: int
    pages_free: int
    pages_cached: int
    pages_used: int
    cache_bytes: int
    prefix_hits: int
    prefix_queries: int
    preemptions: int
    steps: Mapping[str, int]
    finished: Mapping[str, int]
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    computed_tokens: int
    aux_positions: int
    drafted: int
    accepted: int
