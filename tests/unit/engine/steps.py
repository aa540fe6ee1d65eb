"""Steps of several sequences by hand: who has which pages, without a scheduler."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dualflow.engine.executor import SequenceRows, StepRows
from dualflow.engine.request import Request, RequestParams
from dualflow.engine.runner import Runner
from dualflow.engine.sampler import RequestSampler
from dualflow.engine.step_plan import SequencePlan, SequenceResult, StepPlan
from dualflow.engine.torch_executor import TorchExecutor
from dualflow.model import CausalLM, ReadoutLogProbs
from dualflow.testing.steps import whole_sequence

PAGE_SIZE = 4
Guess = Callable[[Request], Sequence[int] | int]
"""The guesses of a step for a sequence, or how many the primary makes."""


def shuffled_pages(num_sequences: int, pages_each: int, seed: int = 0) -> list[list[int]]:
    """Pages of every sequence, in no order at all, out of one pool."""
    pool = list(range(num_sequences * pages_each))
    random.Random(seed).shuffle(pool)
    return [pool[i * pages_each : (i + 1) * pages_each] for i in range(num_sequences)]


def rows_of(
    parts: Sequence[tuple[Sequence[int], int, Sequence[int], Sequence[int], Sequence[int]]],
    keep: bool = False,
) -> StepRows:
    """A step from (tokens, start, pages, rows read, rows of those with auxiliary rows) for each
    sequence; rows are counted within the sequence.
    """
    tokens: list[int] = []
    sequences, read, aux = [], [], []
    for own, start, pages, reads, with_aux in parts:
        sequences.append(SequenceRows(start, len(own), pages, start))
        for row in reads:
            if row in with_aux:
                aux.append(len(read))
            read.append(len(tokens) + row)
        tokens += own
    return StepRows(tokens, sequences, read, aux, keep)


@torch.no_grad()
def expected(model: CausalLM, ids: Sequence[int], aux: bool = True) -> ReadoutLogProbs:
    """The distributions after every token of ``ids``, from one training-style forward."""
    out = whole_sequence(model, torch.tensor(ids))
    return model.log_probs(out.primary_TD, out.aux_FAD if aux else None)


def assert_close(got: Tensor | None, want: Tensor | None, atol: float = 1e-9) -> None:
    assert (got is None) == (want is None)
    if got is not None:
        torch.testing.assert_close(got, want, rtol=0.0, atol=atol)


@dataclass
class Bench:
    """A runner over a tiny model that serves sequences side by side, each in pages of its own."""

    model: CausalLM
    num_sequences: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        each = -(-self.model.config.max_position // PAGE_SIZE)
        self.executor = TorchExecutor(self.model, self.num_sequences * each, PAGE_SIZE)
        self.runner = Runner(self.executor, self.model.config, **self.options)
        self.pages = shuffled_pages(self.num_sequences, each)
        self.requests: dict[str, Request] = {}

    def add(self, prompt: Sequence[int], seed: int = 0, **params: Any) -> Request:
        """A new request and its sampler."""
        given = RequestParams(seed=seed, **params)
        request = Request(str(len(self.requests)), tuple(prompt), given, given.max_tokens or 8)
        config = self.model.config
        sampler = RequestSampler(
            given, vocab_size=config.vocab_size, num_real_tokens=config.num_real_tokens,
            prompt_ids=request.prompt_ids, stop_ids=request.stop_ids, seed=seed,
        )  # fmt: skip
        self.runner.add(request, sampler)
        request.pages = self.pages[len(self.requests)]
        self.requests[request.id] = request
        return request

    def plan(self, request: Request, drafts: Sequence[int] = (), primary: int = 0) -> SequencePlan:
        """All known tokens that are not computed yet, the last read out, and guesses."""
        start = request.num_computed
        known = request.tokens(start, request.length)
        return SequencePlan(
            request.id, known + tuple(drafts), start, tuple(request.pages), start,
            1 + len(drafts), True, len(drafts), primary,
        )  # fmt: skip

    def apply(self, request: Request, result: SequenceResult) -> None:
        """Take over the tokens of a step."""
        assert result.error is None
        request.num_computed = request.length + len(result.tokens) - 1
        request.output_ids += [choice.token_id for choice in result.tokens]

    def step(self, *plans: SequencePlan) -> tuple[SequenceResult, ...]:
        """Run and apply one step."""
        self.last = self.runner.run(StepPlan(plans))
        for plan, result in zip(plans, self.last.sequences, strict=True):
            self.apply(self.requests[plan.request_id], result)
        return self.last.sequences

    def generate(self, count: int, guess: Guess | None = None) -> list[list[int]]:
        """At least ``count`` tokens of every request, cut to as many. ``guess(request)`` gives the
        drafts of a step, or how many the primary makes.
        """
        while any(len(r.output_ids) < count for r in self.requests.values()):
            plans = []
            for request in self.requests.values():
                guesses = guess(request) if guess and request.num_computed else ()
                if isinstance(guesses, int):
                    plans.append(self.plan(request, primary=guesses))
                else:
                    plans.append(self.plan(request, guesses))
            self.step(*plans)
        return [request.output_ids[:count] for request in self.requests.values()]


def chi_square_limit(degrees: int) -> float:
    """What the statistic exceeds once in a thousand times (Wilson and Hilferty 1931)."""
    ninth = 2 / (9 * degrees)
    return degrees * (1 - ninth + 3.0902 * ninth**0.5) ** 3
