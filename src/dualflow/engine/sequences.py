"""What the engine remembers of a request between steps: how far each output is, and its events."""

import time
from dataclasses import dataclass, field

from dualflow.engine.outputs import Event, FinishEvent, PromptEvent, TokenEvent, Usage
from dualflow.engine.request import FinishReason, Request
from dualflow.engine.sampler import RequestSampler
from dualflow.engine.step_plan import Choice, SequencePlan, SequenceResult
from dualflow.engine.text import TextStream


@dataclass(eq=False)
class Sequence:
    """One output on its way.

    index:         which of its request's outputs.
    num_reported:  new tokens whose events were made; text after a stop string has none.
    """

    request: Request
    sampler: RequestSampler
    text: TextStream
    index: int
    group: "PreparedRequest"
    num_reported: int = 0
    aux_positions: int = 0
    drafted: int = 0
    accepted: int = 0
    first_token: float | None = None
    error: str | None = None

    def advance(self, result: SequenceResult, count: int, now: float, events: list[Event]) -> int:
        """Report what a step gave, of which ``count`` tokens stand; returns how many of these the
        output has: none after a stop string.
        """
        self.aux_positions += result.aux_positions
        self.drafted += result.drafted
        self.accepted += result.accepted
        self.error = result.error
        before = self.num_reported
        for choice in result.tokens[:count]:
            if self.first_token is None:
                self.first_token = now
                self._report_prompt(events)
            self.num_reported += 1
            ended = choice.token_id in self.request.stop_ids
            text = "" if ended else self.text.push(choice.token_id)
            events.append(TokenEvent(self.group.request_id, self.index, choice, text))
            if self.text.stopped is not None:
                break
        return self.num_reported - before

    def finish(self, now: float) -> FinishEvent:
        """Its last event; ``request.finish_reason`` says why it ended."""
        request, group = self.request, self.group
        text = self.text.finish()
        reason: FinishReason = request.finish_reason or "error"
        if self.text.stopped is not None and reason in ("length", "context", "stop"):
            reason = "stop"
        group.num_open -= 1
        usage = Usage(
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=request.cached_tokens,
            new_tokens=self.num_reported,
            aux_positions=self.aux_positions,
            drafted=self.drafted,
            accepted=self.accepted,
            preemptions=request.preemptions,
            first_token_seconds=None if self.first_token is None else self.first_token - group.time,
            seconds=now - group.time,
        )
        return FinishEvent(
            group.request_id, self.index, text, reason, usage,
            stop=self.text.stopped, error=self.error, last=group.num_open == 0,
        )  # fmt: skip

    def _report_prompt(self, events: list[Event]) -> None:
        if self.request.params.prompt_logprobs is not None:
            choices = (choice for _, choice in sorted(self.group.prompt_choices.items()))
            events.append(PromptEvent(self.group.request_id, tuple(choices)))


@dataclass(eq=False)
class PreparedRequest:
    """A request that was found good, with all that serving it takes.

    prompt_choices:  what the model thought of the prompt's tokens, by position.
    num_open:        outputs that have not ended.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sequences: list[Sequence] = field(default_factory=list)
    prompt_choices: dict[int, Choice] = field(default_factory=dict)
    num_open: int = 0
    time: float = field(default_factory=time.perf_counter)

    def add_prompt(self, plan: SequencePlan, result: SequenceResult) -> None:
        """Keep what the prompt's own rows reported: each of them thought of the next position."""
        first = plan.start + len(plan.tokens) - plan.num_read + 1
        # After a preemption the same rows come again, with the same result.
        self.prompt_choices.update(enumerate(result.prompt, start=first))
