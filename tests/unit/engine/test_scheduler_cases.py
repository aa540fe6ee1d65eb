"""Cases that users of comparable engines met: what must not happen here."""

import random

import pytest

from dualflow.engine.request import Request, RequestError, RequestParams
from dualflow.engine.scheduler import Scheduler
from dualflow.testing.fake_runner import (
    FakeRunner,
    continuation,
    make_request,
    new_scheduler,
    run_all,
)

COMMON = [7, 8, 9, 7, 8, 1, 2, 3, 4, 5]


def outputs(scheduler: Scheduler, runner: FakeRunner, prompts: list[list[int]]) -> list[list[int]]:
    requests = [make_request(f"r{i}", p, max_tokens=7, arrival=i) for i, p in enumerate(prompts)]
    for request in requests:
        scheduler.add(request)
    run_all(scheduler, runner)
    return [request.output_ids for request in requests]


def test_answers_are_the_same_with_the_prefix_cache_cold_warm_and_evicted():
    prompts = [[*COMMON, i] for i in range(3)] + [COMMON[:8], COMMON[:4]]
    plain = new_scheduler(num_pages=64, prefix_cache=False)
    expected = outputs(plain, FakeRunner(plain), prompts)
    scheduler = new_scheduler(num_pages=24)
    runner = FakeRunner(scheduler)
    assert [outputs(scheduler, runner, prompts) for _ in range(3)] == [expected] * 3
    hits = scheduler.stats().prefix_hits
    assert hits > 3 * 8
    outputs(scheduler, runner, [[i] * 60 for i in range(30, 33)])  # evicts
    assert outputs(scheduler, runner, prompts) == expected


def test_the_second_turn_reads_what_the_first_wrote():
    scheduler = new_scheduler(num_pages=64)
    runner = FakeRunner(scheduler)
    prompt = list(COMMON)
    for turn in range(4):
        request = make_request(f"turn {turn}", prompt, max_tokens=9)
        scheduler.add(request)
        run_all(scheduler, runner)
        assert request.output_ids == continuation(request, 3)[0]
        assert request.cached_tokens >= (len(prompt) - 12 if turn else 0)
        prompt = [*prompt, *request.output_ids, 20 + turn]


@pytest.mark.parametrize("drafts", ["off", "ngram", "primary"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_requests_write_the_same_once(drafts, prefix_cache):
    scheduler = new_scheduler(num_pages=22, max_step_tokens=24, prefix_cache=prefix_cache)
    runner = FakeRunner(scheduler, vocab_size=3)
    requests = []
    for i in range(4):
        params = RequestParams(seed=i, drafts=drafts)
        parent = "r2" if i == 3 else None  # the last two are outputs of one user's request
        prompt = COMMON[: 9 - min(i, 2)]
        requests.append(
            make_request(f"r{i}", prompt, max_tokens=40, arrival=i, parent=parent, params=params)
        )
        scheduler.add(requests[-1])
    run_all(scheduler, runner)
    assert scheduler.stats().preemptions >= 3
    for request in requests:
        assert (request.output_ids, request.finish_reason) == continuation(request, 3)
        assert len(request.output_ids) == 40


def idle(scheduler: Scheduler) -> bool:
    stats = scheduler.stats()
    assert stats.pages_free + stats.pages_cached + stats.pages_used == scheduler.config.num_pages
    return stats.waiting == stats.running == stats.pages_used == 0


def test_nothing_stays_taken_after_aborts_at_every_state():
    rng = random.Random(1)
    scheduler = new_scheduler(num_pages=24, max_step_tokens=11, max_running=6)
    runner = FakeRunner(scheduler, rng=rng)
    counters = (0, 0, 0)
    added = 0
    while added < 500 or scheduler.requests:
        if added < 500 and len(scheduler.requests) < 12:
            added += add_family(scheduler, rng, added)
        abort_some(scheduler, rng)
        plan = scheduler.plan()
        if plan is not None:
            abort_some(scheduler, rng)
            scheduler.apply(plan, runner.run(plan))
        scheduler.check()
        stats = scheduler.stats()
        now = (stats.prefix_queries, stats.prefix_hits, stats.preemptions)
        assert all(new >= old for new, old in zip(now, counters, strict=True))
        counters = now
    assert all(counters)
    finished = scheduler.take_finished()
    reasons = [request.finish_reason for request in finished]
    assert len(finished) == added and min(reasons.count("abort"), reasons.count("length")) > 100
    assert idle(scheduler)
    assert not any(scheduler.abort(request.id) for request in finished)


def add_family(scheduler: Scheduler, rng: random.Random, number: int) -> int:
    prompt = [
        *COMMON[: rng.randrange(1, 11)],
        *(rng.randrange(3) for _ in range(rng.randrange(20))),
    ]
    names = [f"r{number + i}" for i in range(rng.choice([1, 1, 3]))]
    for i, name in enumerate(names):
        params = RequestParams(seed=i, drafts=rng.choice(["off", "ngram", "primary"]))
        parent = names[0] if i else None
        scheduler.add(
            make_request(name, prompt, max_tokens=rng.randrange(1, 30), arrival=number + i,
                         parent=parent, params=params)
        )  # fmt: skip
    return len(names)


def abort_some(scheduler: Scheduler, rng: random.Random) -> None:
    for name in list(scheduler.requests):
        if rng.random() < 0.015:
            assert scheduler.abort(name)
            assert not scheduler.abort(name)


def test_gauges_are_zero_after_an_abort_even_without_a_further_step():
    scheduler = new_scheduler(num_pages=6)
    for i, name in enumerate(["runs", "waits"]):
        scheduler.add(make_request(name, range(30 * i, 30 * i + 20), arrival=i))
    assert scheduler.plan() is not None
    assert not idle(scheduler)
    assert scheduler.abort("runs") and scheduler.abort("waits")
    assert idle(scheduler)


def reasons(requests: list[Request]) -> dict[str, str | None]:
    return {request.id: request.finish_reason for request in requests}


def test_a_prompt_that_can_never_fit_is_refused_and_blocks_nobody():
    scheduler = new_scheduler(num_pages=10)
    with pytest.raises(RequestError, match="11 pages"):
        scheduler.add(make_request("long", range(44)))
    scheduler.add(make_request("short", [1]))
    assert reasons(run_all(scheduler)) == {"short": "length"}


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_growth_past_the_whole_cache_ends_that_request_alone(prefix_cache):
    scheduler = new_scheduler(num_pages=10, prefix_cache=prefix_cache)
    grows = make_request("grows", range(36), max_tokens=12)
    short = make_request("short", [1, 2], arrival=1, max_tokens=6)
    scheduler.add(grows)
    scheduler.add(short)
    run_all(scheduler)
    assert reasons([grows, short]) == {"grows": "cache", "short": "length"}
    # 40 positions hold the prompt and four new tokens; the fifth needs no position of its own.
    assert grows.output_ids == continuation(grows, 3)[0][:5]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_two_that_outgrow_the_cache_together_end_one_after_the_other(prefix_cache):
    scheduler = new_scheduler(num_pages=10, prefix_cache=prefix_cache)
    requests = [make_request(f"grows {i}", range(50 * i, 50 * i + 8), arrival=i, max_tokens=30)
                for i in range(2)]  # fmt: skip
    requests.append(make_request("short", [1], arrival=2))
    for request in requests:
        scheduler.add(request)
    run_all(scheduler)
    assert set(reasons(requests).values()) == {"length"}
    assert all(request.output_ids == continuation(request, 3)[0] for request in requests)
    assert requests[1].preemptions and not requests[0].preemptions


def test_two_endless_requests_and_a_short_one_all_end():
    scheduler = new_scheduler(num_pages=10)
    for i, (name, prompt) in enumerate([("one", [1]), ("two", [2]), ("short", [3])]):
        tokens = 4 if name == "short" else 10_000
        scheduler.add(make_request(name, prompt, arrival=i, max_tokens=tokens))
    assert reasons(run_all(scheduler)) == {"one": "cache", "two": "cache", "short": "length"}
