"""The fake runner must notice what it is there to notice."""

from dataclasses import replace

import pytest

from dualflow.engine.step_plan import SequencePlan, StepPlan
from dualflow.testing.fake_runner import FakeRunner, make_request, new_scheduler, run_all

TEXT = list(range(12))


def second_plan() -> tuple[FakeRunner, StepPlan]:
    """The plan of a request whose whole prompt is cached, beside one that reads its own."""
    scheduler = new_scheduler()
    runner = FakeRunner(scheduler)
    scheduler.add(make_request("first", TEXT, max_tokens=1))
    run_all(scheduler, runner)
    scheduler.add(make_request("a", TEXT))
    scheduler.add(make_request("b", [5, 6, 7]))
    plan = scheduler.plan()
    assert plan is not None
    return runner, plan


def changed(plan: StepPlan, index: int, **fields) -> StepPlan:
    sequences: list[SequencePlan] = list(plan.sequences)
    sequences[index] = replace(sequences[index], **fields)
    return replace(plan, sequences=tuple(sequences))


def test_a_good_plan_passes():
    runner, plan = second_plan()
    assert [len(result.tokens) for result in runner.run(plan).sequences] == [1, 1]


@pytest.mark.parametrize(
    ("index", "fields", "message"),
    [
        (0, {"write_from": 11}, "is cached and written"),
        (1, {"write_from": 1}, "position 0 reads another's key"),
        (1, {"pages": (0,)}, None),
        (1, {"tokens": (5, 6)}, None),
        (1, {"start": 1, "tokens": (6, 7)}, None),
        (1, {"samples": False}, None),
    ],
)
def test_a_fault_in_a_plan_is_seen(index, fields, message):
    runner, plan = second_plan()
    with pytest.raises(AssertionError, match=message):
        runner.run(changed(plan, index, **fields))


def test_a_page_that_holds_other_tokens_is_seen():
    runner, plan = second_plan()
    page = plan.sequences[0].pages[0]
    runner.memory[page, 2] = ("", 0)
    with pytest.raises(AssertionError, match="position 2 reads another's key"):
        runner.run(plan)


def test_a_key_of_another_tenant_is_seen():
    runner, plan = second_plan()
    page = plan.sequences[0].pages[1]
    runner.memory[page, 0] = ("other", runner.memory[page, 0][1])
    with pytest.raises(AssertionError, match="position 4 reads another's key"):
        runner.run(plan)


def test_a_forgotten_copy_is_seen():
    scheduler = new_scheduler()
    runner = FakeRunner(scheduler)
    for name, parent in [("a", None), ("b", "a")]:
        scheduler.add(make_request(name, [1, 2, 3], parent=parent))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(plan, runner.run(plan))
    plan = scheduler.plan()
    assert plan is not None and plan.copies
    with pytest.raises(AssertionError, match="reads another's key"):
        runner.run(replace(plan, copies=()))
