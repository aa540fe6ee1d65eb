"""Any requests, any cache, any interruption: no page leaks or has two writers, every key that is
read was made from the reader's own tokens, budgets hold, and every request ends with the tokens it
would have got alone.
"""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from dualflow.engine.request import Request, RequestParams, StructuredOutput
from dualflow.engine.step_plan import StepPlan
from dualflow.testing.fake_runner import FakeRunner, continuation, make_request, new_scheduler

COMMON = [0, 1, 1, 2, 0, 1, 1, 2, 2, 0, 1, 0, 2, 2, 1, 0, 0, 1, 2, 1]

params = st.builds(
    RequestParams,
    seed=st.integers(0, 1),
    drafts=st.sampled_from(["off", "ngram", "primary"]),
    num_drafts=st.integers(1, 5),
    prompt_logprobs=st.sampled_from([None, None, 0]),
    structured=st.sampled_from([None, None, None, StructuredOutput("json")]),
    priority=st.integers(-1, 1),
    min_tokens=st.integers(0, 2),
)


class SchedulerMachine(RuleBasedStateMachine):
    """``plan`` and ``apply`` are rules of their own, so that anything can happen in between."""

    @initialize(
        num_pages=st.sampled_from([12, 8, 20, 5, 3, 1]),
        page_size=st.sampled_from([2, 1, 3, 4]),
        max_running=st.sampled_from([4, 5, 2, 1]),
        max_step_tokens=st.sampled_from([8, 64, 3, 2, 1]),
        max_chunk_tokens=st.sampled_from([None, None, 1, 3]),
        prefix_cache=st.sampled_from([True, True, False]),
        vocab_size=st.integers(1, 3),
        seed=st.integers(0, 99),
    )
    def start(self, vocab_size, seed, **limits):
        self.scheduler = new_scheduler(**limits)
        self.runner = FakeRunner(self.scheduler, vocab_size, rng=random.Random(seed))
        self.requests: list[Request] = []
        self.finished: list[Request] = []
        self.pending: StepPlan | None = None
        self.ended_by_us: set[str] = set()

    @property
    def capacity(self):
        return self.scheduler.config.num_pages * self.scheduler.config.page_size

    @rule(
        common=st.sampled_from([8, 12, 20, 3, 0]),
        own=st.lists(st.integers(0, 2), max_size=4),
        max_tokens=st.integers(2, 16),
        params=params,
        tenant=st.sampled_from(["", "", "a"]),
        stop_ids=st.sampled_from([frozenset(), frozenset(), frozenset([1])]),
        n=st.sampled_from([1, 1, 2, 3]),
    )
    def add(self, common, own, max_tokens, params, tenant, stop_ids, n):
        self.add_family([*COMMON[:common], *own] or [0], n, max_tokens, params, tenant, stop_ids)

    def add_family(self, prompt, n, max_tokens, params, tenant, stop_ids):
        prompt = prompt[: self.capacity]
        first = f"r{len(self.requests)}"
        for i in range(n):
            number = len(self.requests)
            request = make_request(
                f"r{number}", prompt, max_tokens=max_tokens, arrival=number, params=params,
                tenant=tenant, stop_ids=stop_ids, parent=first if i else None,
            )  # fmt: skip
            self.scheduler.add(request)
            self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), params=params, max_tokens=st.integers(1, 8), n=st.integers(1, 3))
    def next_turn(self, data, params, max_tokens, n):
        """Somebody goes on with what another has read and written so far."""
        before = data.draw(st.sampled_from(self.requests))
        tokens = [*before.prompt_ids, *before.output_ids]
        end = data.draw(st.integers(1, len(tokens)))
        self.add_family(tokens[:end], n, max_tokens, params, before.tenant, frozenset())

    @rule(count=st.integers(1, 12))
    def step(self, count):
        for _ in range(count):
            self.make_plan()
            self.take_result()

    @rule()
    def make_plan(self):
        """Where a plan waits for its result, its step has failed."""
        self.pending = self.scheduler.plan()
        assert (self.pending is None) == (not self.scheduler.requests)

    @precondition(lambda self: self.pending is not None)
    @rule()
    def take_result(self):
        plan, self.pending = self.pending, None
        if plan is not None:
            live = set(self.scheduler.requests)
            result = self.runner.run(plan)
            counts = self.scheduler.apply(plan, result)
            for sequence, outcome, count in zip(
                plan.sequences, result.sequences, counts, strict=True
            ):
                gives = sequence.samples and sequence.request_id in live and not outcome.error
                assert (count >= 1) == gives

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
        assert self.scheduler.abort(name)
        assert not self.scheduler.abort(name)

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data(), reason=st.sampled_from(["stop", "error"]))
    def finish(self, data, reason):
        name = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
        self.scheduler.finish(name, reason)
        self.ended_by_us.add(name)

    @precondition(lambda self: self.pending is not None)
    @rule()
    def fail(self):
        """One sequence of the step that runs fails."""
        assert self.pending is not None
        name = self.pending.sequences[0].request_id
        self.runner.fails = lambda plan: plan.request_id == name
        self.ended_by_us.add(name)
        self.take_result()
        self.runner.fails = lambda plan: False

    @invariant()
    def pages_and_gauges_agree(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        stats = self.scheduler.stats()
        total = stats.pages_free + stats.pages_cached + stats.pages_used
        assert total == self.scheduler.config.num_pages
        assert stats.running <= self.scheduler.config.max_running
        self.finished += self.scheduler.take_finished()
        assert len(self.finished) + len(self.scheduler.requests) == len(self.requests)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        # At least one token is computed in a step, and of those that run the first never loses
        # what it has: as many steps for each token as there are requests are more than enough.
        tokens = sum(len(r.prompt_ids) + r.max_tokens for r in self.scheduler.requests.values())
        for _ in range(tokens * (len(self.scheduler.requests) + 1)):
            if not self.scheduler.requests:
                break
            self.step(1)
            self.pages_and_gauges_agree()
        assert not self.scheduler.requests, "somebody waits for ever"
        stats = self.scheduler.stats()
        assert stats.waiting == stats.running == stats.pages_used == 0
        assert {id(r) for r in self.finished} == {id(r) for r in self.requests}
        for request in self.requests:
            self.check_ending(request)

    def check_ending(self, request):
        expected, reason = continuation(request, self.runner.vocab_size)
        assert request.output_ids == expected[: len(request.output_ids)]
        if request.finish_reason == "cache":
            assert request.length > self.capacity
        elif request.finish_reason != "abort" and request.id not in self.ended_by_us:
            assert (request.output_ids, request.finish_reason) == (expected, reason)
        # A fork does not report its prompt; whoever does, does so from the start and once.
        reported = self.runner.reported.get(request.id, [])
        wanted = request.params.prompt_logprobs is not None and request.parent is None
        assert reported == list(range(len(reported))) and (wanted or not reported)
        if wanted and request.output_ids:
            assert len(reported) == len(request.prompt_ids) - 1


SchedulerMachine.TestCase.settings = settings(stateful_step_count=40)
TestScheduler = SchedulerMachine.TestCase
