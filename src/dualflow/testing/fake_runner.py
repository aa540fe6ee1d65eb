"""A runner without a model, for tests of scheduling: tokens come from a hash of all before them,
and the cache holds, for every key, which tokens it was made from.

A row that reads a key made from other tokens than its own sequence's, by another tenant, or never
written, fails at once; so does a row that writes into a page that somebody else can see. The tokens
of a request depend on nothing but its prompt and seed, so every schedule must give the same.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dualflow.engine.request import Request, RequestParams
from dualflow.engine.scheduler import Scheduler, SchedulerConfig
from dualflow.engine.step_plan import Choice, SequencePlan, SequenceResult, StepPlan, StepResult

Key = tuple[str, int]
"""What a cache slot holds: the tenant, and a hash of all tokens up to that position."""


def prefix_hashes(tokens: Sequence[int]) -> list[int]:
    """One number for each position, made from the tokens up to it."""
    hashes, current = [], 0
    for token in tokens:
        current = hash((current, token))
        hashes.append(current)
    return hashes


def next_token(tokens: Sequence[int], seed: int, vocab_size: int) -> int:
    """The token that follows ``tokens``."""
    return hash((prefix_hashes(tokens)[-1], seed, 7)) % vocab_size  # of numbers: no random salt


def continuation(request: Request, vocab_size: int) -> tuple[list[int], str]:
    """All new tokens that ``request`` gets where the cache is large enough, and why it ends."""
    output: list[int] = []
    while True:
        tokens = [*request.prompt_ids, *output]
        output.append(next_token(tokens, request.params.seed or 0, vocab_size))
        if output[-1] in request.stop_ids and len(output) > request.params.min_tokens:
            return output, "stop"
        if len(output) == request.max_tokens:
            return output, request.limit_reason


@dataclass
class FakeRunner:
    """Answers the plans of ``scheduler`` and checks every one.

    vocab_size:  small, so that guesses hold now and then.
    fails:       says of a plan whether its sequence fails in this step.
    reported:    prompt positions whose log-probabilities were reported, by request.
    """

    scheduler: Scheduler
    vocab_size: int = 3
    fails: Callable[[SequencePlan], bool] = lambda plan: False
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    memory: dict[tuple[int, int], Key] = field(default_factory=dict)
    reported: dict[str, list[int]] = field(default_factory=dict)
    steps: int = 0

    def run(self, plan: StepPlan) -> StepResult:
        """Check ``plan`` and answer it."""
        config = self.scheduler.config
        assert plan.sequences
        assert plan.num_tokens <= config.max_step_tokens
        assert len(plan.sequences) <= config.max_running
        assert len({s.request_id for s in plan.sequences}) == len(plan.sequences)
        self.steps += 1
        for source, target in plan.copies:
            assert self.scheduler.pool.refcount(target) <= 1  # 0: aborted in the meantime
            for slot in range(config.page_size):
                if (source, slot) in self.memory:
                    self.memory[target, slot] = self.memory[source, slot]
        results = []
        for sequence in plan.sequences:
            if sequence.request_id not in self.scheduler.requests:  # aborted in the meantime
                results.append(SequenceResult(sequence.request_id))
            elif self.fails(sequence):
                results.append(SequenceResult(sequence.request_id, error="it failed"))
            else:
                results.append(self._answer(sequence))
        return StepResult(tuple(results))

    def _answer(self, plan: SequencePlan) -> SequenceResult:
        request = self.scheduler.requests[plan.request_id]
        self._check(plan, request)
        params, known = request.params, request.tokens(0, request.length)
        tokens = [*known[: plan.start], *plan.tokens]
        self._write(tokens, plan.start, plan, request)
        prompt = self._prompt_rows(plan, request)
        if not plan.samples:
            return SequenceResult(plan.request_id, prompt=prompt)
        drafts = list(plan.tokens[len(plan.tokens) - plan.num_drafts :])
        if plan.primary_drafts:
            drafts = self._primary_drafts(known, params.seed or 0, plan.primary_drafts)
            tokens = [*known, *drafts]
            self._write(tokens, request.length, plan, request)
        chosen: list[int] = []
        for draft in [*drafts, None]:
            token = next_token([*known, *chosen], params.seed or 0, self.vocab_size)
            chosen.append(token)
            if token != draft:
                break
        return SequenceResult(
            plan.request_id,
            tuple(Choice(token, -1.0) for token in chosen),
            prompt,
            drafted=len(drafts),
            accepted=len(chosen) - 1,
        )

    def _check(self, plan: SequencePlan, request: Request) -> None:
        size, known = self.scheduler.config.page_size, request.length
        certain = len(plan.tokens) - plan.num_drafts
        end = plan.start + len(plan.tokens) + plan.primary_drafts
        assert plan.tokens[:certain] == request.tokens(plan.start, plan.start + certain)
        assert certain >= 1 and plan.num_drafts >= 0
        assert plan.samples == (plan.start + certain == known)
        assert plan.start == request.num_computed
        assert len(plan.pages) == -(-end // size)
        assert plan.pages == tuple(request.pages[: len(plan.pages)])
        assert plan.num_read >= (plan.num_drafts + 1 if plan.samples else 0)
        if drafts := plan.num_drafts + plan.primary_drafts:
            assert drafts <= request.params.num_drafts
            assert len(request.output_ids) + drafts + 1 <= request.max_tokens
            assert request.params.structured is None

    def _write(
        self, tokens: Sequence[int], start: int, plan: SequencePlan, request: Request
    ) -> None:
        """The rows of positions from ``start`` on write their keys; all must then find their own
        past.
        """
        size, pool = self.scheduler.config.page_size, self.scheduler.pool
        hashes = prefix_hashes(tokens)
        for position in range(max(start, plan.write_from), len(tokens)):
            page = plan.pages[position // size]
            assert pool.refcount(page) == 1, f"page {page} is shared and written"
            assert not pool.is_remembered(page), f"page {page} is cached and written"
            self.memory[page, position % size] = (request.tenant, hashes[position])
        for position, expected in enumerate(hashes):
            key = self.memory.get((plan.pages[position // size], position % size))
            assert key == (request.tenant, expected), f"position {position} reads another's key"

    def _prompt_rows(self, plan: SequencePlan, request: Request) -> tuple[Choice, ...]:
        """Rows that are read and not sampled belong to the prompt, and are reported once."""
        sampled = plan.num_drafts + 1 if plan.samples else 0
        end = plan.start + len(plan.tokens) - sampled
        first = end - (plan.num_read - sampled)
        if first < end:
            reported = self.reported.setdefault(plan.request_id, [])
            assert end < len(request.prompt_ids)
            reported.extend(range(first, end))
        return tuple(Choice(request.prompt_ids[i + 1], -1.0) for i in range(first, end))

    def _primary_drafts(self, known: Sequence[int], seed: int, count: int) -> list[int]:
        """Guesses of which a random number holds."""
        good = self.rng.randrange(count + 1)
        drafts: list[int] = []
        for i in range(count):
            token = next_token([*known, *drafts], seed, self.vocab_size)
            drafts.append(token if i < good else (token + 1) % self.vocab_size)
        return drafts


def make_request(
    name: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 4,
    arrival: int = 0,
    tenant: str = "",
    parent: str | None = None,
    stop_ids: frozenset[int] = frozenset(),
    params: RequestParams | None = None,
) -> Request:
    """A request as the engine makes them."""
    return Request(
        id=name,
        prompt_ids=tuple(prompt),
        params=params or RequestParams(seed=0),
        max_tokens=max_tokens,
        arrival=arrival,
        tenant=tenant,
        parent=parent,
        stop_ids=stop_ids,
    )


def run_all(
    scheduler: Scheduler, runner: FakeRunner | None = None, max_steps: int = 10_000
) -> list[Request]:
    """Step until nothing is left; all requests that ended, in that order."""
    runner = runner or FakeRunner(scheduler)
    finished = scheduler.take_finished()
    for _ in range(max_steps):
        plan = scheduler.plan()
        if plan is None:
            assert not scheduler.requests
            scheduler.check()
            return finished + scheduler.take_finished()
        scheduler.apply(plan, runner.run(plan))
        scheduler.check()
        finished += scheduler.take_finished()
    raise AssertionError(f"{len(scheduler.requests)} requests have not ended")


def new_scheduler(
    num_pages: int = 16, page_size: int = 4, max_running: int = 8, max_step_tokens: int = 16,
    max_chunk_tokens: int | None = None, prefix_cache: bool = True,
) -> Scheduler:  # fmt: skip
    """A scheduler for a small cache."""
    return Scheduler(
        SchedulerConfig(
            num_pages=num_pages, page_size=page_size, max_running=max_running,
            max_step_tokens=max_step_tokens, max_chunk_tokens=max_chunk_tokens,
            prefix_cache=prefix_cache,
        )
    )  # fmt: skip
