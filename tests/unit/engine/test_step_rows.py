from typing import Any

import pytest

from dualflow.engine.request import RequestParams, StructuredOutput
from dualflow.engine.scheduler import Scheduler
from dualflow.engine.step_plan import Choice, SequencePlan, SequenceResult, StepResult
from dualflow.testing.fake_runner import make_request, new_scheduler

REPEATING = [1, 2, 3, 4] * 3


def give(scheduler: Scheduler, *tokens: int) -> None:
    """The next step of every sequence gives ``tokens``."""
    plan = scheduler.plan()
    assert plan is not None
    choices = tuple(Choice(token, -1.0) for token in tokens)
    results = tuple(
        SequenceResult(s.request_id, choices[: 1 + s.num_drafts + s.primary_drafts])
        for s in plan.sequences
    )
    scheduler.apply(plan, StepResult(results))


def plans(scheduler: Scheduler) -> list[SequencePlan]:
    plan = scheduler.plan()
    assert plan is not None
    return list(plan.sequences)


def drafting(
    kind: Any = "ngram", prompt=REPEATING, max_tokens=20, num_drafts=4, name="a", **params
):
    return make_request(
        name,
        prompt,
        max_tokens=max_tokens,
        params=RequestParams(drafts=kind, num_drafts=num_drafts, **params),
    )


def test_ngram_guesses_follow_the_last_token_and_are_all_read():
    scheduler = new_scheduler()
    scheduler.add(drafting())
    give(scheduler, 1)
    [plan] = plans(scheduler)
    assert plan.tokens == (1, 2, 3, 4, 1)
    assert (plan.start, plan.num_drafts, plan.num_read, plan.primary_drafts) == (12, 4, 5, 0)
    assert len(plan.pages) == 5  # positions 12 to 16


def test_where_nothing_repeats_nothing_is_guessed():
    scheduler = new_scheduler()
    scheduler.add(drafting(prompt=[1, 2, 3]))
    give(scheduler, 4)
    [plan] = plans(scheduler)
    assert (plan.tokens, plan.num_drafts, plan.num_read) == ((4,), 0, 1)


def test_primary_guesses_are_the_runners_and_have_their_pages():
    scheduler = new_scheduler()
    scheduler.add(drafting("primary"))
    give(scheduler, 9)
    [plan] = plans(scheduler)
    assert (plan.tokens, plan.num_drafts, plan.primary_drafts) == ((9,), 0, 4)
    assert len(plan.pages) == 5


@pytest.mark.parametrize("kind", ["ngram", "primary"])
def test_guesses_that_hold_count_as_computed(kind):
    scheduler = new_scheduler()
    request = drafting(kind)
    scheduler.add(request)
    give(scheduler, 1)
    give(scheduler, 2, 3, 9)  # two hold
    assert request.output_ids == [1, 2, 3, 9]
    assert (request.num_computed, request.length) == (15, 16)
    [plan] = plans(scheduler)
    assert (plan.start, plan.tokens[0]) == (15, 9)


@pytest.mark.parametrize(("max_tokens", "expected"), [(2, 0), (3, 1), (5, 3), (6, 4), (7, 4)])
@pytest.mark.parametrize("kind", ["ngram", "primary"])
def test_no_more_is_guessed_than_may_be_written(kind, max_tokens, expected):
    scheduler = new_scheduler()
    scheduler.add(drafting(kind, max_tokens=max_tokens))
    give(scheduler, 1)
    [plan] = plans(scheduler)
    assert plan.num_drafts + plan.primary_drafts == expected


def test_guesses_keep_to_the_budget_after_everybody_has_a_row():
    scheduler = new_scheduler(max_step_tokens=12, max_chunk_tokens=3, num_pages=40)
    for name in "abc":
        scheduler.add(drafting("primary", prompt=[1, 2], name=name))
    give(scheduler, 1)
    assert [plan.primary_drafts for plan in plans(scheduler)] == [4, 4, 1]


def test_guesses_leave_a_share_to_prompts():
    scheduler = new_scheduler(max_step_tokens=8)
    scheduler.add(drafting("primary", num_drafts=8, prompt=[1]))
    give(scheduler, 1)
    scheduler.add(make_request("b", range(20)))
    writing, reading = plans(scheduler)
    assert (writing.primary_drafts, len(reading.tokens)) == (5, 2)


def test_guesses_are_dropped_where_pages_are_short_and_nobody_is_preempted():
    scheduler = new_scheduler(num_pages=5)
    first = drafting("primary", prompt=range(7), num_drafts=8)
    second = make_request("b", range(20, 27))
    scheduler.add(first)
    scheduler.add(second)
    give(scheduler, 1)
    # Two pages each, and one is left: half the guesses have a place.
    assert [(s.primary_drafts, len(s.tokens)) for s in plans(scheduler)] == [(4, 1), (0, 1)]
    assert scheduler.stats().preemptions == 0


def test_one_page_too_few_for_all_guesses_allows_some():
    scheduler = new_scheduler(num_pages=4)
    scheduler.add(drafting("primary", prompt=range(13), num_drafts=8))
    give(scheduler, 1)
    [plan] = plans(scheduler)
    assert (plan.start, plan.primary_drafts) == (13, 2)


@pytest.mark.parametrize("kind", ["ngram", "primary"])
def test_nothing_is_guessed_in_a_given_shape(kind):
    scheduler = new_scheduler()
    scheduler.add(drafting(kind, structured=StructuredOutput("json")))
    give(scheduler, 1)
    [plan] = plans(scheduler)
    assert plan.num_drafts == plan.primary_drafts == 0


def test_rows_of_the_prompt_are_read_for_its_logprobs_in_every_chunk():
    scheduler = new_scheduler(max_step_tokens=5)
    scheduler.add(make_request("a", range(12), params=RequestParams(prompt_logprobs=1)))
    seen = []
    for _ in range(3):
        [plan] = plans(scheduler)
        seen.append((plan.num_read, plan.samples))
        tokens = (Choice(1, -1.0),) if plan.samples else ()
        full = scheduler._planned
        assert full is not None
        scheduler.apply(full[0], StepResult((SequenceResult("a", tokens),)))
    assert seen == [(5, False), (5, False), (2, True)]
