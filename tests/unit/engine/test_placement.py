import pytest

from dualflow.engine.request import Request, RequestParams
from dualflow.engine.scheduler import Scheduler
from dualflow.engine.step_plan import SequencePlan, StepPlan
from dualflow.testing.fake_runner import FakeRunner, make_request, new_scheduler, run_all

TEXT = tuple(range(10, 22))
Warm = tuple[Scheduler, FakeRunner]
LOGPROBS = RequestParams(seed=0, prompt_logprobs=0)


def step(scheduler: Scheduler, runner: FakeRunner) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(plan, runner.run(plan))
    scheduler.check()
    return plan


def first_plan(scheduler: Scheduler, runner: FakeRunner, request: Request) -> SequencePlan:
    scheduler.add(request)
    return step(scheduler, runner).sequences[-1]


@pytest.fixture
def warm():
    """A scheduler that has seen TEXT, three pages of it, and its runner."""
    scheduler = new_scheduler()
    runner = FakeRunner(scheduler)
    scheduler.add(make_request("first", TEXT, max_tokens=1))
    run_all(scheduler, runner)
    return scheduler, runner


def test_a_known_beginning_is_not_computed_again(warm: Warm):
    request = make_request("a", [*TEXT[:8], 1, 2, 3])
    plan = first_plan(*warm, request)
    assert (plan.start, plan.tokens, plan.write_from) == (8, (1, 2, 3), 8)
    assert request.cached_tokens == 8
    stats = warm[0].stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (12 + 11, 8)


def test_of_a_prompt_known_to_its_end_the_last_position_is_computed_and_not_written(warm: Warm):
    request = make_request("a", TEXT)
    plan = first_plan(*warm, request)
    assert (plan.start, plan.tokens, plan.write_from) == (11, TEXT[-1:], 12)
    assert (plan.num_read, plan.samples, len(plan.pages)) == (1, True, 3)
    assert request.cached_tokens == 11
    assert request.num_computed == 12
    run_all(*warm)


def test_without_a_prefix_cache_everything_is_computed():
    scheduler = new_scheduler(prefix_cache=False)
    runner = FakeRunner(scheduler)
    for name in "ab":
        plan = first_plan(scheduler, runner, make_request(name, TEXT, max_tokens=1))
        assert plan.start == 0
    stats = scheduler.stats()
    assert (stats.prefix_queries, stats.pages_cached, stats.pages_free) == (0, 0, 16)


def test_another_tenants_prefix_is_not_read(warm: Warm):
    assert first_plan(*warm, make_request("a", TEXT, tenant="other")).start == 0


def test_two_that_run_share_pages_and_the_last_to_end_gives_them_back(warm: Warm):
    scheduler, runner = warm
    for name in "ab":
        scheduler.add(make_request(name, [*TEXT[:8], ord(name)], max_tokens=3))
    plan = step(scheduler, runner)
    shared = plan.sequences[0].pages[:2]
    assert shared == plan.sequences[1].pages[:2]
    assert [scheduler.pool.refcount(page) for page in shared] == [2, 2]
    scheduler.abort("a")
    assert [scheduler.pool.refcount(page) for page in shared] == [1, 1]
    run_all(scheduler, runner)
    assert [scheduler.pool.refcount(page) for page in shared] == [0, 0]


def test_what_a_request_wrote_is_a_prefix_of_the_next_turn():
    scheduler = new_scheduler()
    runner = FakeRunner(scheduler)
    first = make_request("a", TEXT[:5], max_tokens=8)
    scheduler.add(first)
    run_all(scheduler, runner)
    second = make_request("b", [*TEXT[:5], *first.output_ids, 99])
    assert first_plan(scheduler, runner, second).start == 12  # the 13th was never computed


def test_a_request_for_prompt_logprobs_computes_every_row_once_and_leaves_its_pages(warm: Warm):
    scheduler, runner = warm
    request = make_request("a", TEXT, params=LOGPROBS)
    plan = first_plan(scheduler, runner, request)
    assert (plan.start, plan.num_read, plan.samples) == (0, 12, True)
    run_all(scheduler, runner)
    assert runner.reported["a"] == list(range(11))
    scheduler = new_scheduler()
    runner = FakeRunner(scheduler)
    scheduler.add(make_request("a", TEXT, params=LOGPROBS))
    run_all(scheduler, runner)
    assert first_plan(scheduler, runner, make_request("b", TEXT)).start == 11


def test_prompt_logprobs_are_reported_once_though_the_prompt_is_read_twice():
    scheduler = new_scheduler(num_pages=5, max_chunk_tokens=1)
    runner = FakeRunner(scheduler)
    scheduler.add(make_request("a", [1], max_tokens=12))
    step(scheduler, runner)
    low = make_request("b", TEXT, arrival=1, params=LOGPROBS, max_tokens=8)
    scheduler.add(low)
    while not low.preemptions:
        assert not low.output_ids
        step(scheduler, runner)
    assert 0 < len(runner.reported["b"]) < 11
    run_all(scheduler, runner)
    assert runner.reported["b"] == list(range(11))


@pytest.mark.parametrize("length", [3, 4, 5, 8])
def test_forks_wait_for_the_prompt_then_share_it_and_copy_the_partial_page(length):
    scheduler = new_scheduler(prefix_cache=False, max_step_tokens=3)
    runner = FakeRunner(scheduler)
    family = [
        make_request(name, TEXT[:length], parent=parent, params=RequestParams(seed=seed))
        for seed, (name, parent) in enumerate([("a", None), ("b", "a"), ("c", "a")])
    ]
    for request in family:
        scheduler.add(request)
    plan = step(scheduler, runner)
    while family[0].num_computed < length:
        assert [s.request_id for s in plan.sequences] == ["a"]
        plan = step(scheduler, runner)
    plan = step(scheduler, runner)
    forks = plan.sequences[1:]
    assert [s.request_id for s in forks] == ["b", "c"]
    full, rest = divmod(length, 4)
    for fork in forks:
        assert (fork.start, fork.tokens) == (length - 1, TEXT[length - 1 : length])
        assert fork.write_from == length
        assert fork.pages[:full] == plan.sequences[0].pages[:full]
    source = plan.sequences[0].pages[full]
    assert plan.copies == tuple((source, fork.pages[full]) for fork in forks if rest)
    assert [request.cached_tokens for request in family] == [0, length - 1, length - 1]
    run_all(scheduler, runner)
    assert scheduler.stats().pages_free == 16


def test_waiting_forks_hold_up_nobody():
    scheduler = new_scheduler(max_step_tokens=4)
    runner = FakeRunner(scheduler)
    scheduler.add(make_request("a", TEXT))
    scheduler.add(make_request("b", TEXT, parent="a"))
    step(scheduler, runner)
    step(scheduler, runner)
    scheduler.add(make_request("other", [1], arrival=5))
    assert [s.request_id for s in step(scheduler, runner).sequences] == ["a"]
    plan = step(scheduler, runner)
    assert {s.request_id for s in plan.sequences} == {"a", "b", "other"}


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_fork_whose_parent_has_gone_reads_the_prompt_itself(when):
    scheduler = new_scheduler(max_step_tokens=4, prefix_cache=False)
    runner = FakeRunner(scheduler)
    scheduler.add(make_request("a", TEXT))
    scheduler.add(make_request("b", TEXT, parent="a", arrival=1))
    if when == "meanwhile":
        step(scheduler, runner)
    scheduler.abort("a")
    assert step(scheduler, runner).sequences[0].request_id == "b"
    run_all(scheduler, runner)


def test_a_fork_whose_parent_lost_its_pages_waits_until_they_are_computed_again():
    scheduler = new_scheduler(num_pages=5, max_chunk_tokens=1, prefix_cache=False)
    runner = FakeRunner(scheduler)
    scheduler.add(make_request("high", [1], max_tokens=12))
    step(scheduler, runner)
    parent = make_request("a", TEXT, arrival=1, max_tokens=2)
    fork = make_request("b", TEXT, arrival=2, parent="a", max_tokens=2)
    scheduler.add(parent)
    scheduler.add(fork)
    finished = run_all(scheduler, runner)
    assert parent.preemptions
    assert fork.cached_tokens == 11
    assert {request.finish_reason for request in finished} == {"length"}


def test_nobody_is_let_in_whose_pages_the_next_step_could_take_back():
    scheduler = new_scheduler(num_pages=3)
    runner = FakeRunner(scheduler)
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=5))
    step(scheduler, runner)
    late = make_request("b", TEXT[:8], arrival=1, max_tokens=1)
    scheduler.add(late)
    assert [s.request_id for s in step(scheduler, runner).sequences] == ["a"]
    run_all(scheduler, runner)
    assert late.finish_reason == "length" and not late.preemptions


def test_the_least_urgent_gives_up_its_pages_then_who_came_last():
    scheduler = new_scheduler(num_pages=9)
    runner = FakeRunner(scheduler)
    requests = [
        make_request(name, [i], max_tokens=16, arrival=i, params=RequestParams(priority=priority))
        for i, (name, priority) in enumerate([("low", 1), ("early", 0), ("late", 0)])
    ]
    scheduler.add(requests[0])
    step(scheduler, runner)
    for request in requests[1:]:
        scheduler.add(request)
    seen: list[str] = []
    while scheduler.requests:
        step(scheduler, runner)
        seen += [r.id for r in requests if r.preemptions and r.id not in seen]
    assert seen == ["low"]


def test_among_equals_who_came_last_gives_up_its_pages():
    scheduler = new_scheduler(num_pages=7)
    late = make_request("late", [1], arrival=2, max_tokens=16)
    early = make_request("early", [2], arrival=1, max_tokens=16)
    scheduler.add(late)
    scheduler.add(early)
    run_all(scheduler)
    assert (early.preemptions, late.preemptions) == (0, 1)


def test_pages_of_guesses_that_did_not_hold_are_given_back():
    scheduler = new_scheduler(max_step_tokens=64)
    runner = FakeRunner(scheduler, vocab_size=50)
    params = RequestParams(seed=0, drafts="primary", num_drafts=20)
    request = make_request("a", TEXT[:3], max_tokens=30, params=params)
    scheduler.add(request)
    step(scheduler, runner)
    drafted = 0
    while scheduler.requests:
        plan = step(scheduler, runner).sequences[0]
        drafted = max(drafted, len(plan.pages))
        assert len(request.pages) in (0, -(-request.length // 4))
    assert drafted > 5
