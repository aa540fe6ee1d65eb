import pytest

from dualflow.engine.request import RequestError
from dualflow.engine.scheduler import Scheduler
from dualflow.engine.scheduler_config import QueueFullError, SchedulerConfig
from dualflow.testing.fake_runner import make_request, new_scheduler, run_all


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_pages", 0), ("page_size", -1), ("max_running", True), ("max_step_tokens", 1.5),
     ("max_chunk_tokens", 0), ("max_waiting", -1)],
)  # fmt: skip
def test_limits_are_whole_numbers(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}; expected a whole number from"):
        SchedulerConfig(**{"num_pages": 4, name: value})


def test_a_prompt_larger_than_the_cache_is_refused_with_numbers():
    scheduler = new_scheduler(num_pages=10, page_size=4)
    message = r"has 41 tokens, which take 11 pages .* it has only 10 \(40 tokens\)"
    with pytest.raises(RequestError, match=message):
        scheduler.add(make_request("a", range(41)))
    assert not scheduler.requests
    scheduler.add(make_request("a", range(40), max_tokens=1))
    assert [r.finish_reason for r in run_all(scheduler)] == ["length"]


def test_an_id_is_free_again_when_its_request_has_ended():
    scheduler = new_scheduler()
    scheduler.add(make_request("a", [1]))
    with pytest.raises(RequestError, match="the request id 'a' is taken by a live request"):
        scheduler.add(make_request("a", [1]))
    scheduler.abort("a")
    scheduler.add(make_request("a", [1]))


def test_a_request_runs_once():
    scheduler = new_scheduler()
    request = make_request("a", [1])
    scheduler.add(request)
    scheduler.abort("a")
    with pytest.raises(RequestError, match="request 'a' is finished already"):
        scheduler.add(request)


@pytest.mark.parametrize(("prompt", "max_tokens"), [([], 1), ([1], 0)])
def test_there_must_be_something_to_read_and_to_write(prompt, max_tokens):
    with pytest.raises(RequestError, match="expected at least one of both"):
        new_scheduler().add(make_request("a", prompt, max_tokens=max_tokens))


def test_a_fork_of_another_prompt_is_refused():
    scheduler = new_scheduler()
    scheduler.add(make_request("a", [1, 2]))
    with pytest.raises(RequestError, match="share the prompt of 'a', which is another"):
        scheduler.add(make_request("b", [1, 3], parent="a"))


def test_the_queue_is_as_long_as_max_waiting_says_beside_free_slots():
    scheduler = Scheduler(SchedulerConfig(num_pages=8, max_running=2, max_waiting=1))
    for name in "abc":  # two will run at once, one waits
        scheduler.add(make_request(name, [1]))
    with pytest.raises(QueueFullError, match="1 requests wait already, and 1 may"):
        scheduler.add(make_request("d", [1]))
    scheduler.add(make_request("c.1", [1], parent="c"))
    scheduler.plan()
    with pytest.raises(QueueFullError, match="2 requests wait already, and 1 may"):
        scheduler.add(make_request("d", [1]))
    scheduler.abort("a")
    scheduler.abort("b")
    scheduler.add(make_request("d", [1]))
