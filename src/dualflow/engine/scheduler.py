"""Which rows run next: continuous batching over a paged cache. No torch.

Each step, sequences that write get their rows first, one each and their guesses; what is left of
the budget goes to prompts, in chunks, so that a long prompt never holds up the others for longer
than one step's budget. Where pages run out, guesses are dropped, then the sequence of the lowest
rank gives its pages back and is computed again later, with the tokens it has: nothing is sampled
twice.
"""

from bisect import bisect_left, insort

from dualflow.engine.pages import PagePool
from dualflow.engine.placement import Placement, Scheduled
from dualflow.engine.prefix_cache import PrefixCache
from dualflow.engine.request import FinishReason, Request, RequestError, Status
from dualflow.engine.scheduler_config import (
    SchedulerConfig,
    SchedulerStats,
    check_queue,
    check_request,
)
from dualflow.engine.step_plan import SequencePlan, SequenceResult, StepPlan, StepResult
from dualflow.engine.step_rows import plan_chunk, plan_writing


class Scheduler:
    """Decides the rows of each step for the live requests.

    ``plan`` and ``apply`` take turns; ``add``, ``abort`` and ``finish`` may be called between any
    two calls, also between a plan and its result.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = PagePool(config.num_pages, config.page_size)
        self.cache = PrefixCache(self.pool, config.model_key) if config.prefix_cache else None
        self.requests: dict[str, Request] = {}
        """Live requests by id: to be read only."""
        self._placement = Placement(self.pool, self.cache)
        self._max_chunk = config.max_chunk_tokens or config.max_step_tokens
        self._live: dict[str, Scheduled] = {}
        self._waiting: list[Scheduled] = []  # by rank
        self._running: list[Scheduled] = []
        self._finished: list[Request] = []
        self._planned: tuple[StepPlan, list[Scheduled]] | None = None
        self._serial = self._step = self._preemptions = 0

    def add(self, request: Request) -> None:
        """Let ``request`` wait for its turn.

        Raises ``RequestError`` for what can never be served: a prompt larger than the whole cache,
        an id that is taken; ``QueueFullError`` where ``max_waiting`` others wait already (forks of
        a request that was let in always are, too).
        """
        check_request(request, self.config, taken=request.id in self._live)
        free_slots = max(self.config.max_running - len(self._running), 0)
        if request.parent not in self._live:
            check_queue(len(self._waiting) - free_slots, self.config)
        parent = self._live.get(request.parent) if request.parent is not None else None
        if parent is not None and parent.request.prompt_ids != request.prompt_ids:
            raise RequestError(
                f"request {request.id!r} is to share the prompt of {request.parent!r}, "
                "which is another"
            )
        self._serial += 1
        seq = Scheduled(request, self._serial, parent)
        self._live[request.id] = seq
        self.requests[request.id] = request
        insort(self._waiting, seq, key=_rank)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state; False: there is none (any more) of that id."""
        return self._finish(request_id, "abort")

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request for a reason that the scheduler does not know of, such as a stop string.
        No harm where it has ended.
        """
        self._finish(request_id, reason)

    def take_finished(self) -> list[Request]:
        """Requests that ended since the last call, for whatever reason, in that order."""
        finished, self._finished = self._finished, []
        return finished

    def stats(self) -> SchedulerStats:
        """How things stand now."""
        pool, placement = self.pool, self._placement
        return SchedulerStats(
            waiting=len(self._waiting), running=len(self._running), pages_free=pool.num_free,
            pages_cached=pool.num_cached, pages_used=pool.num_referenced,
            prefix_queries=placement.prefix_queries, prefix_hits=placement.prefix_hits,
            preemptions=self._preemptions,
        )  # fmt: skip

    def plan(self) -> StepPlan | None:
        """The next step; None: no request is left to run.

        Requests can end here, with reason ``cache``, where they have outgrown the whole cache.
        Where the last plan was never applied, for its step failed, nobody knows what its sequences'
        pages hold: those that still live start over with the tokens they have.
        """
        if self._planned is not None:
            sequences, self._planned = self._planned[1], None
            for seq in sequences:
                if seq.request.status is Status.RUNNING:
                    self._preempt(seq)
        while self._live:
            before = (self._preemptions, len(self._live))
            planned = self._plan_step()
            if planned is not None:
                self._planned = planned
                return planned[0]
            # Rows were given up to make room, so others have room now. Nothing else can be in the
            # way; if it were, one request ends rather than that all of them wait for ever.
            if before == (self._preemptions, len(self._live)):
                self._end((self._waiting or self._running)[0], "cache")
        return None

    def apply(self, plan: StepPlan, result: StepResult) -> tuple[int, ...]:
        """Take over what a step gave; returns how many of each sequence's new tokens stand.

        Tokens after a stop id or above ``max_tokens`` do not; of a request that was ended in the
        meantime, none.
        """
        if self._planned is None or self._planned[0] is not plan:
            raise RuntimeError("the result belongs to another plan than the last")
        sequences, self._planned = self._planned[1], None
        return tuple(
            self._apply_sequence(seq, planned, outcome)
            for seq, planned, outcome in zip(
                sequences, plan.sequences, result.sequences, strict=True
            )
        )

    def check(self) -> None:
        """Assert that pages and their owners agree: for tests, and for engines at rest."""
        self.pool.check()
        if self.cache is not None:
            self.cache.check()
        owners = [0] * self.config.num_pages
        for seq in self._running:
            assert len(set(seq.request.pages)) == len(seq.request.pages)
            for page in seq.request.pages:
                owners[page] += 1
        assert owners == [self.pool.refcount(page) for page in range(self.config.num_pages)]
        assert not any(seq.request.pages for seq in self._waiting), "one that waits owns pages"
        assert len(self._waiting) + len(self._running) == len(self._live) == len(self.requests)

    # One step.

    def _plan_step(self) -> tuple[StepPlan, list[Scheduled]] | None:
        self._step += 1
        writing, prompts = self._turns()
        writing = self._secure_pages(writing)
        left = self.config.max_step_tokens - len(writing)
        share = self.config.max_step_tokens // 4 if prompts or self._may_admit() else 0
        sequences, plans = [], []
        extra = left - max(share, 1 if prompts else 0)
        for seq in writing:
            plan = plan_writing(seq, self._placement, extra)
            drafts = plan.num_drafts + plan.primary_drafts
            extra, left = extra - drafts, left - drafts
            sequences.append(seq)
            plans.append(plan)
        for seq in prompts:
            if left > 0 and seq.request.status is Status.RUNNING:
                plan = plan_chunk(seq, self._placement, min(left, self._max_chunk))
                left -= len(plan.tokens)
                sequences.append(seq)
                plans.append(plan)
        copies: list[tuple[int, int]] = []
        self._admit(left, sequences, plans, copies)
        for seq in sequences:
            seq.last_step = self._step
        return (StepPlan(tuple(plans), tuple(copies)), sequences) if plans else None

    def _turns(self) -> tuple[list[Scheduled], list[Scheduled]]:
        """Who gets rows: sequences that write, and prompts by rank. Where the budget does not
        reach for one row each, those go first that have waited longest.
        """
        writing: list[Scheduled] = []
        prompts: list[Scheduled] = []
        for seq in self._running:
            pending = seq.length - seq.request.num_computed
            (writing if pending == 1 else prompts).append(seq)
        prompts.sort(key=_rank)
        room = self.config.max_step_tokens
        if room > 1 and not prompts and self._may_admit():
            room -= 1  # so that those who wait get on, too
        if len(writing) + min(len(prompts), 1) <= room:
            return writing, prompts
        chosen = sorted([*writing, *prompts[:1]], key=lambda seq: seq.last_step)[:room]
        turns = set(map(id, chosen))
        writing = [seq for seq in writing if id(seq) in turns]
        return writing, prompts if prompts and id(prompts[0]) in turns else []

    def _may_admit(self) -> bool:
        return bool(self._waiting) and len(self._running) < self.config.max_running

    def _secure_pages(self, writing: list[Scheduled]) -> list[Scheduled]:
        """A page for each next row, at the cost of sequences of lower rank."""
        for seq in writing:
            while seq.request.status is Status.RUNNING and not self._placement.grow(
                seq, seq.length
            ):
                if self.pool.pages_for(seq.length) > self.config.num_pages:
                    self._end(seq, "cache")
                else:
                    self._preempt(max(self._running, key=_rank))
        return [seq for seq in writing if seq.request.status is Status.RUNNING]

    def _admit(
        self,
        left: int,
        sequences: list[Scheduled],
        plans: list[SequencePlan],
        copies: list[tuple[int, int]],
    ) -> None:
        """Let those who wait start, by rank, and nobody overtake for want of pages: a large
        request would wait for ever.
        """
        index = 0
        while left > 0 and self._may_admit() and index < len(self._waiting):
            seq = self._waiting[index]
            if self.pool.pages_for(seq.length) > self.config.num_pages:
                self._end(seq, "cache")
                continue
            if seq.start_of() == "later":
                index += 1
                continue
            # One page for each that runs already, or the next step would have to take them back.
            new_copies = self._placement.place(seq, len(self._running))
            if new_copies is None:
                break
            copies += new_copies
            del self._waiting[index]
            seq.request.status = Status.RUNNING
            self._running.append(seq)
            plan = plan_chunk(seq, self._placement, min(left, self._max_chunk))
            left -= len(plan.tokens)
            sequences.append(seq)
            plans.append(plan)

    def _apply_sequence(
        self, seq: Scheduled, planned: SequencePlan, outcome: SequenceResult
    ) -> int:
        request = seq.request
        assert outcome.request_id == planned.request_id, "results are in the order of their plan"
        if request.status is not Status.RUNNING:
            return 0
        if outcome.error is not None:
            self._end(seq, "error")
            return 0
        most = 1 + planned.num_drafts + planned.primary_drafts if planned.samples else 0
        if not bool(most) <= len(outcome.tokens) <= most:
            raise ValueError(
                f"request {request.id!r} got {len(outcome.tokens)} tokens in a step that gives "
                f"{bool(most):d} to {most}"
            )
        seq.prompt_reported = max(
            seq.prompt_reported,
            min(planned.start + len(planned.tokens), len(request.prompt_ids) - 1),
        )
        count, reason = 0, None
        for choice in outcome.tokens:
            request.output_ids.append(choice.token_id)
            count += 1
            reason = self._reason_to_end(request, choice.token_id)
            if reason is not None:
                break
        seq.length += count
        certain = len(planned.tokens) - planned.num_drafts
        request.num_computed = planned.start + certain + max(count - 1, 0)
        self._placement.settle(seq)
        if reason is not None:
            self._end(seq, reason)
        return count

    def _reason_to_end(self, request: Request, token: int) -> FinishReason | None:
        count = len(request.output_ids)
        if token in request.stop_ids and count > request.params.min_tokens:
            return "stop"
        return request.limit_reason if count >= request.max_tokens else None

    # The end of a request, or of its turn.

    def _preempt(self, seq: Scheduled) -> None:
        self._running.remove(seq)
        self._placement.release(seq)
        seq.parent = None
        seq.request.status = Status.WAITING
        seq.request.preemptions += 1
        self._preemptions += 1
        insort(self._waiting, seq, key=_rank)

    def _finish(self, request_id: str, reason: FinishReason) -> bool:
        seq = self._live.get(request_id)
        if seq is not None:
            self._end(seq, reason)
        return seq is not None

    def _end(self, seq: Scheduled, reason: FinishReason) -> None:
        request = seq.request
        if request.status is Status.RUNNING:
            self._running.remove(seq)
            self._placement.release(seq)
        else:
            del self._waiting[bisect_left(self._waiting, seq.rank, key=_rank)]
        request.status, request.finish_reason = Status.FINISHED, reason
        del self._live[request.id], self.requests[request.id]
        self._finished.append(request)


def _rank(seq: Scheduled) -> tuple[int, int, int]:
    return seq.rank
