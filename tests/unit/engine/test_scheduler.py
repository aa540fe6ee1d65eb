import pytest

from dualflow.engine.request import RequestParams, Status
from dualflow.engine.scheduler import Scheduler
from dualflow.engine.step_plan import Choice, SequenceResult, StepPlan, StepResult
from dualflow.testing.fake_runner import (
    FakeRunner,
    continuation,
    make_request,
    new_scheduler,
    run_all,
)


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    return plan


def step(scheduler: Scheduler, runner: FakeRunner) -> StepPlan:
    plan = planned(scheduler)
    scheduler.apply(plan, runner.run(plan))
    scheduler.check()
    return plan


def rows(plan: StepPlan) -> dict[str, int]:
    return {s.request_id: len(s.tokens) for s in plan.sequences}


def answer(plan: StepPlan, *tokens: tuple[int, ...]) -> StepResult:
    return StepResult(
        tuple(
            SequenceResult(s.request_id, tuple(Choice(token, -1.0) for token in new))
            for s, new in zip(plan.sequences, tokens, strict=True)
        )
    )


def test_no_requests_no_plan():
    scheduler = new_scheduler()
    assert scheduler.plan() is None
    assert scheduler.take_finished() == []


def test_a_request_is_read_then_written_token_by_token():
    scheduler = new_scheduler()
    request = make_request("a", [5, 6, 7], max_tokens=3)
    scheduler.add(request)
    plan = planned(scheduler)
    [sequence] = plan.sequences
    assert (sequence.tokens, sequence.start, sequence.num_read) == ((5, 6, 7), 0, 1)
    assert sequence.samples and len(sequence.pages) == 1
    assert scheduler.apply(plan, answer(plan, (8,))) == (1,)
    assert (request.num_computed, request.length) == (3, 4)
    plan = planned(scheduler)
    assert (plan.sequences[0].tokens, plan.sequences[0].start) == ((8,), 3)
    scheduler.apply(plan, answer(plan, (9,)))
    plan = planned(scheduler)
    assert len(plan.sequences[0].pages) == 2  # position 4 is on the second page
    scheduler.apply(plan, answer(plan, (1,)))
    assert scheduler.take_finished() == [request] and scheduler.take_finished() == []
    assert (request.output_ids, request.finish_reason) == ([8, 9, 1], "length")
    assert (request.status, request.pages) == (Status.FINISHED, [])
    assert scheduler.plan() is None


def test_the_limit_names_its_reason():
    scheduler = new_scheduler()
    request = make_request("a", [1], max_tokens=2)
    request.limit_reason = "context"
    scheduler.add(request)
    run_all(scheduler)
    assert request.finish_reason == "context"


def test_a_stop_id_ends_and_is_kept_and_what_follows_it_is_not():
    scheduler = new_scheduler()
    params = RequestParams(drafts="primary", num_drafts=3)
    request = make_request("a", [1, 2, 3, 4], max_tokens=9, stop_ids=frozenset([8]), params=params)
    scheduler.add(request)
    plan = planned(scheduler)
    scheduler.apply(plan, answer(plan, (7,)))
    plan = planned(scheduler)
    assert plan.sequences[0].primary_drafts == 3
    assert scheduler.apply(plan, answer(plan, (6, 8, 5))) == (2,)
    assert (request.output_ids, request.finish_reason) == ([7, 6, 8], "stop")


def test_a_stop_id_does_not_count_before_min_tokens():
    scheduler = new_scheduler()
    params = RequestParams(min_tokens=2, max_tokens=9)
    request = make_request("a", [1], max_tokens=9, stop_ids=frozenset([8]), params=params)
    scheduler.add(request)
    for _ in range(3):
        plan = planned(scheduler)
        scheduler.apply(plan, answer(plan, (8,)))
    assert (request.output_ids, request.finish_reason) == ([8, 8, 8], "stop")


def test_those_who_write_come_first_and_a_long_prompt_is_read_in_what_is_left():
    scheduler = new_scheduler(max_step_tokens=8)
    runner = FakeRunner(scheduler)
    scheduler.add(make_request("a", [1], max_tokens=9))
    scheduler.add(make_request("b", [2], max_tokens=9))
    step(scheduler, runner)
    scheduler.add(make_request("long", range(15)))
    plans = [step(scheduler, runner) for _ in range(4)]
    assert [rows(plan) for plan in plans] == [
        {"a": 1, "b": 1, "long": 6},
        {"a": 1, "b": 1, "long": 6},
        {"a": 1, "b": 1, "long": 3},
        {"a": 1, "b": 1, "long": 1},
    ]
    reads = [plan.sequences[2].num_read for plan in plans]
    assert reads == [0, 0, 1, 1]
    assert [plan.sequences[2].samples for plan in plans] == [False, False, True, True]


def test_a_chunk_is_no_longer_than_max_chunk_tokens():
    scheduler = new_scheduler(max_step_tokens=8, max_chunk_tokens=3)
    scheduler.add(make_request("a", range(7)))
    scheduler.add(make_request("b", range(50, 57)))
    assert rows(planned(scheduler)) == {"a": 3, "b": 3}


def test_where_rows_are_few_everybody_gets_a_turn():
    scheduler = new_scheduler(max_step_tokens=2, num_pages=40)
    runner = FakeRunner(scheduler)
    requests = [make_request(name, [1, 2, 3], max_tokens=20, arrival=i)
                for i, name in enumerate("abcd")]  # fmt: skip
    for request in requests:
        scheduler.add(request)
    last = dict.fromkeys("abcd", 0)
    for number in range(1, 31):
        for name in rows(step(scheduler, runner)):
            assert number - last[name] <= 8
            last[name] = number
    assert all(request.output_ids for request in requests)


def test_one_row_a_step_is_enough_for_all():
    scheduler = new_scheduler(max_step_tokens=1)
    requests = [make_request(name, range(n), arrival=n) for name, n in [("a", 5), ("b", 3)]]
    for request in requests:
        scheduler.add(request)
    run_all(scheduler)
    assert [request.output_ids for request in requests] == [continuation(r, 3)[0] for r in requests]


def test_no_more_than_max_running_run_at_once():
    scheduler = new_scheduler(max_running=2)
    for name in "abc":
        scheduler.add(make_request(name, [1]))
    assert set(rows(planned(scheduler))) == {"a", "b"}
    stats = scheduler.stats()
    assert (stats.running, stats.waiting) == (2, 1)


def test_smaller_priority_goes_first_then_who_came_first():
    scheduler = new_scheduler(max_running=1)
    for name, priority, arrival in [
        ("late", 0, 3),
        ("low", 1, 1),
        ("early", 0, 2),
        ("high", -1, 4),
    ]:
        params = RequestParams(priority=priority)
        scheduler.add(make_request(name, [1], max_tokens=1, arrival=arrival, params=params))
    assert [r.id for r in run_all(scheduler)] == ["high", "early", "late", "low"]


def test_a_request_that_fails_ends_alone():
    scheduler = new_scheduler()
    runner = FakeRunner(scheduler, fails=lambda plan: plan.request_id == "a")
    for name in "ab":
        scheduler.add(make_request(name, [1, 2]))
    reasons = {r.id: r.finish_reason for r in run_all(scheduler, runner)}
    assert reasons == {"a": "error", "b": "length"}


@pytest.mark.parametrize("tokens", [(), (1, 2)])
def test_a_wrong_number_of_tokens_is_refused(tokens):
    scheduler = new_scheduler()
    scheduler.add(make_request("a", [1, 2]))
    plan = planned(scheduler)
    with pytest.raises(ValueError, match=f"got {len(tokens)} tokens in a step that gives 1 to 1"):
        scheduler.apply(plan, answer(plan, tokens))


def test_a_result_belongs_to_the_last_plan():
    scheduler = new_scheduler()
    scheduler.add(make_request("a", [1]))
    plan = planned(scheduler)
    scheduler.apply(plan, answer(plan, (1,)))
    with pytest.raises(RuntimeError, match="belongs to another plan"):
        scheduler.apply(plan, answer(plan, (1,)))


def test_what_is_aborted_between_plan_and_result_gets_nothing():
    scheduler = new_scheduler()
    first = make_request("a", [1])
    scheduler.add(first)
    plan = planned(scheduler)
    scheduler.abort("a")
    again = make_request("a", [1, 2])
    scheduler.add(again)
    assert scheduler.apply(plan, answer(plan, (1,))) == (0,)
    assert first.output_ids == again.output_ids == []
    run_all(scheduler)
    assert again.output_ids == continuation(again, 3)[0]


def test_a_step_without_result_is_computed_again():
    scheduler = new_scheduler()
    runner = FakeRunner(scheduler)
    requests = [make_request("a", [1, 2, 3, 4, 5]), make_request("b", [1, 2, 3, 4, 5], parent="a")]
    for request in requests:
        scheduler.add(request)
    step(scheduler, runner)
    assert planned(scheduler).copies  # b starts, and its copied page is never filled
    run_all(scheduler, runner)
    assert [request.preemptions for request in requests] == [1, 1]
    assert [request.output_ids for request in requests] == [continuation(r, 3)[0] for r in requests]


def test_the_engine_can_end_a_request_for_its_own_reasons():
    scheduler = new_scheduler()
    request = make_request("a", [1])
    scheduler.add(request)
    scheduler.finish("a", "stop")
    scheduler.finish("a", "error")
    assert request.finish_reason == "stop"
    assert scheduler.take_finished() == [request]


def test_pages_that_somebody_else_holds_do_not_make_it_wait_for_ever():
    scheduler = new_scheduler(num_pages=4)
    scheduler.pool.allocate(4)
    scheduler.add(make_request("a", [1]))
    assert scheduler.plan() is None
    assert [r.finish_reason for r in scheduler.take_finished()] == ["cache"]
