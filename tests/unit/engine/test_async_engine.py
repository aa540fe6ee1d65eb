"""``AsyncEngine``: concurrent streams, cancellation, failures that reach everyone."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest

from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.engine import (
    AsyncEngine,
    Engine,
    EngineStoppedError,
    Event,
    FinishEvent,
    RequestError,
    RequestParams,
    TokenEvent,
)
from dualflow.model import CausalLM
from dualflow.testing import tiny_config
from dualflow.testing.engines import run_all, tiny_engine
from dualflow.testing.tensors import tiny_model

GREEDY = RequestParams(temperature=0, max_tokens=6)
LONG = RequestParams(temperature=0, max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return tiny_model(tiny_config("dual", vocab_size=259))


@pytest.fixture
def engine(model: CausalLM) -> Engine:
    return tiny_engine(model, bytes_tokenizer(), num_pages=400)


@pytest.fixture
def steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator["Steps"]:
    steps = Steps(engine)
    monkeypatch.setattr(engine, "step", steps.step)
    yield steps
    steps.gate.set()


class Steps:
    """Holds the engine's steps back as long as ``gate`` is not set, and counts them."""

    def __init__(self, engine: Engine) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.count = 0
        self.error: Exception | None = None
        self._step: Callable[[], list[Event]] = engine.step

    def step(self) -> list[Event]:
        assert self.gate.wait(20)
        self.count += 1
        if self.error is not None:
            raise self.error
        return self._step()


def run(engine: Engine, scenario: Callable[[AsyncEngine], Coroutine[Any, Any, Any]]) -> Any:
    """What ``scenario`` returns; the engine is closed afterwards, and nothing may be left."""

    async def main() -> Any:
        async with AsyncEngine(engine) as client:
            return await asyncio.wait_for(scenario(client), 30)

    result = asyncio.run(main())
    engine.check_idle()
    return result


async def collect(events: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in events]


def ids(events: list[Event]) -> list[int]:
    return [event.choice.token_id for event in events if isinstance(event, TokenEvent)]


def test_many_streams_at_once_get_what_each_gets_alone(model: CausalLM, engine: Engine) -> None:
    prompts = [[97 + i % 20, 98, 99 + i % 3] for i in range(60)]
    params = [replace(GREEDY, max_tokens=2 + i % 7) for i in range(60)]

    async def scenario(client: AsyncEngine) -> list[list[Event]]:
        streams = (client.generate(p, q) for p, q in zip(prompts, params, strict=True))
        return await asyncio.gather(*map(collect, streams))

    got = run(engine, scenario)
    alone = tiny_engine(model, num_pages=400)
    names = [alone.add(p, q) for p, q in zip(prompts, params, strict=True)]
    reference = run_all(alone, names)
    for events, name in zip(got, names, strict=True):
        assert ids(events) == list(reference[name].outputs[0].token_ids)
        assert isinstance(events[-1], FinishEvent)


def test_a_cancelled_task_gives_its_pages_back_within_two_steps(
    engine: Engine, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborts: list[int] = []
    abort = engine.abort

    def counted(request_id: str) -> bool:
        aborts.append(steps.count)
        return abort(request_id)

    monkeypatch.setattr(engine, "abort", counted)

    async def scenario(client: AsyncEngine) -> None:
        first = asyncio.Event()

        async def read() -> None:
            async for _ in client.generate([97] * 20, LONG):
                first.set()

        other = asyncio.create_task(collect(client.generate([98], LONG)))
        task = asyncio.create_task(read())
        await first.wait()
        steps.gate.clear()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        before = steps.count
        steps.gate.set()
        while not aborts:
            await asyncio.sleep(0.001)
        assert aborts[0] - before <= 2
        while client.stats().running > 1:
            await asyncio.sleep(0.001)
        assert client.stats().finished.get("abort") == 1
        assert len(ids(await other)) == 100

    run(engine, scenario)


def test_leaving_the_iterator_ends_the_request(engine: Engine) -> None:
    async def scenario(client: AsyncEngine) -> None:
        stream = client.generate([97], LONG)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        while client.stats().running:
            await asyncio.sleep(0.001)

    run(engine, scenario)


def test_an_abort_from_outside_ends_the_iterator(engine: Engine) -> None:
    async def scenario(client: AsyncEngine) -> list[Event]:
        events = []
        async for event in client.generate([97], LONG, request_id="a"):
            events.append(event)
            if len(events) == 3:
                await client.abort("a")
                await client.abort("a")
                await client.abort("unknown")
        return events

    end = run(engine, scenario)[-1]
    assert isinstance(end, FinishEvent)
    assert (end.reason, end.last) == ("abort", True)


def test_what_is_wrong_with_a_request_reaches_it_alone(model: CausalLM) -> None:
    engine = tiny_engine(model, num_pages=40, max_waiting=0, max_running=1)

    async def scenario(client: AsyncEngine) -> list[Event]:
        stream = client.generate([97], replace(LONG, max_tokens=40), request_id="a")
        first = await anext(stream)
        for prompt, name, message in (
            ([], None, "no tokens"),
            ([300], None, "token id 300"),
            ([97], "a", "in use"),
            ([97], None, "try again later"),
        ):
            with pytest.raises(RequestError, match=message):
                await collect(client.generate(prompt, GREEDY, request_id=name))
        return [first, *await collect(stream)]

    assert len(ids(run(engine, scenario))) == 40


def test_a_step_that_fails_reaches_every_iterator_and_those_to_come(
    engine: Engine, steps: Steps
) -> None:
    async def scenario(client: AsyncEngine) -> None:
        streams = [client.generate([97 + i], LONG) for i in range(5)]
        for stream in streams:
            await anext(stream)
        steps.error = OSError("the device is gone")
        for stream in streams:
            with pytest.raises(EngineStoppedError, match="device is gone") as caught:
                await collect(stream)
            assert caught.value.__cause__ is steps.error
        with pytest.raises(EngineStoppedError, match="device is gone"):
            await collect(client.generate([97], GREEDY))
        assert client.failure is steps.error
        stats = client.stats()
        assert (stats.running, stats.pages_used) == (0, 0)
        await client.abort("whatever")

    run(engine, scenario)


def test_closing_ends_every_iterator(engine: Engine) -> None:
    async def scenario(client: AsyncEngine) -> None:
        streams = [client.generate([97 + i], LONG) for i in range(3)]
        for stream in streams:
            await anext(stream)
        await client.close()
        await client.close()
        for stream in streams:
            with pytest.raises(EngineStoppedError, match="was closed"):
                await collect(stream)
        with pytest.raises(EngineStoppedError, match="was closed"):
            await collect(client.generate([97], GREEDY))
        assert client.failure is None

    run(engine, scenario)


def test_an_event_loop_that_has_gone_leaves_nothing_running(engine: Engine) -> None:
    client = AsyncEngine(engine)

    async def begin() -> AsyncIterator[Event]:
        stream = client.generate([97], LONG)
        await anext(stream)
        return stream

    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(begin())
    loop.close()  # without closing its iterators

    async def others() -> list[Event]:
        return await collect(client.generate([98], GREEDY))

    assert len(ids(asyncio.run(others()))) == 6

    async def end() -> None:
        while client.stats().running:
            await asyncio.sleep(0.001)
        await client.close()

    asyncio.run(end())
    engine.check_idle()
    del stream


def test_the_state_is_known_when_the_last_event_is(engine: Engine) -> None:
    async def scenario(client: AsyncEngine) -> None:
        await collect(client.generate([97], GREEDY))
        stats = client.stats()
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
        assert stats.finished == {"length": 1}

    run(engine, scenario)


LEAVES_AMID_A_STEP = """
import asyncio, sys
import torch
from dualflow.engine import AsyncEngine, RequestParams
from dualflow.testing import tiny_config
from dualflow.testing.engines import tiny_engine
from dualflow.testing.tensors import tiny_model

torch.set_num_threads(1)
engine = tiny_engine(tiny_model(tiny_config("dual")), num_pages=400)
client = AsyncEngine(engine)

async def main():
    async for _ in client.generate([1], RequestParams(max_tokens=100)):
        sys.exit(3)

asyncio.run(main())
"""


def test_leaving_the_interpreter_with_a_live_engine_is_quiet() -> None:
    """A thread that it stops in the wrong place would abort the process."""
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", LEAVES_AMID_A_STEP], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (3, "")


def test_a_fork_is_told_that_the_engine_is_elsewhere(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(client: AsyncEngine) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(client._thread, "is_alive", lambda: False)
            with pytest.raises(EngineStoppedError, match="a fork"):
                await collect(client.generate([97], GREEDY))
            await client.abort("whatever")
        assert len(ids(await collect(client.generate([97], GREEDY)))) == 6

    run(engine, scenario)
