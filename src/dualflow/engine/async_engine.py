"""The engine for asyncio: it steps in a thread of its own, and every request is an async
iterator.
"""

import asyncio
import atexit
import threading
import weakref
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol, Self

from dualflow.engine.engine import Engine
from dualflow.engine.outputs import EngineStats, Event, FinishEvent
from dualflow.engine.request import RequestError, RequestParams
from dualflow.engine.sequences import PreparedRequest


class EngineStoppedError(RuntimeError):
    """The engine was closed, or a step failed (``__cause__``); it serves no more requests."""


class EngineClient(Protocol):
    """What a server needs of an engine: ours, or an adapter to another."""

    def generate(
        self,
        prompt: str | Sequence[int],
        params: RequestParams | None = None,
        *,
        request_id: str | None = None,
        tenant: str = "",
    ) -> AsyncIterator[Event]:
        """Continue one prompt, event by event; leaving the iterator ends the request.

        What is wrong with the request comes as ``RequestError`` in place of the first event.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request: its iterator gets the last events. Nothing where there is none."""
        ...

    def stats(self) -> EngineStats:
        """As of the last step or command."""
        ...

    async def close(self) -> None:
        """End every request and the engine."""
        ...


class AsyncEngine:
    """An ``EngineClient`` over ``engine``, which from now on belongs to it alone.

    A request whose iterator is left (its task cancelled, say) is aborted before the next step.
    Where a step fails, every iterator raises ``EngineStoppedError`` from that failure.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: SimpleQueue[_Start | _Leave | _Abort | None] = SimpleQueue()
        self._waiters: dict[str, _Waiter] = {}
        self._lock = threading.Lock()
        self._stopped = False
        self._failure: BaseException | None = None
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._serve, name="dualflow-engine", daemon=True)
        self._thread.start()
        _RUNNING.add(self)

    @classmethod
    def load(cls, path: str | Path, **settings: Any) -> "AsyncEngine":
        """An engine for the model in a folder, as ``LLM`` makes it."""
        from dualflow.config import from_dict
        from dualflow.engine.config import EngineConfig

        return cls(Engine.load(path, from_dict(EngineConfig, settings)))

    @property
    def engine(self) -> Engine:
        """The engine beneath: its tokenizer and settings may be read, nothing else touched."""
        return self._engine

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine; None while it runs, and after ``close``."""
        return self._failure

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: RequestParams | None = None,
        *,
        request_id: str | None = None,
        tenant: str = "",
    ) -> AsyncIterator[Event]:
        """``EngineClient.generate``. Raises ``EngineStoppedError``."""
        prepare = self._engine.prepare
        if isinstance(prompt, str):  # here, as a tokenizer is not for two threads at once
            prompt = self._engine.encode(prompt)
        if params is not None and params.structured is not None:  # compiling takes a while
            prepared = await asyncio.to_thread(
                prepare, prompt, params, request_id=request_id, tenant=tenant
            )
        else:
            prepared = prepare(prompt, params, request_id=request_id, tenant=tenant)
        waiter = _Waiter(asyncio.get_running_loop())
        self._post(_Start(prepared, waiter))
        ended = False
        try:
            while not ended:
                item = await waiter.queue.get()
                ended = not isinstance(item, Event) or _is_last(item)
                if not isinstance(item, Event):
                    raise item
                yield item
        finally:
            if not ended:
                self._post(_Leave(prepared.request_id, waiter))

    async def abort(self, request_id: str) -> None:
        """``EngineClient.abort``."""
        self._post(_Abort(request_id))

    def stats(self) -> EngineStats:
        """``EngineClient.stats``."""
        return self._stats

    async def close(self) -> None:
        """End every request, whose iterators raise ``EngineStoppedError``, and the thread. Twice is
        fine.
        """
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _post(self, command: "_Start | _Leave | _Abort") -> None:
        with self._lock:
            # After a fork the thread is the other process's alone.
            if not self._stopped and self._thread.is_alive():
                self._commands.put(command)
                return
        if isinstance(command, _Start):
            raise self._stop_error()

    # Everything below runs in the engine's thread.

    def _serve(self) -> None:
        try:
            while self._obey():
                events = self._engine.step() if self._engine.has_work else []
                self._stats = self._engine.stats()
                self._deliver(events)
        except BaseException as error:  # whatever it is, somebody waits to hear of it
            self._failure = error
        self._stop()

    def _obey(self) -> bool:
        """Carry out what was asked; wait for it where there is nothing else to do. False: end."""
        wait = not self._engine.has_work
        while True:
            try:
                command = self._commands.get(block=wait)
            except Empty:
                return True
            wait = False
            match command:
                case None:
                    return False
                case _Start():
                    self._start(command)
                case _Leave(request_id, waiter):
                    if self._waiters.get(request_id) is waiter:
                        del self._waiters[request_id]
                        self._engine.abort(request_id)
                case _Abort(request_id):
                    self._engine.abort(request_id)

    def _start(self, command: "_Start") -> None:
        try:
            self._engine.submit(command.prepared)
        except RequestError as error:
            _send(command.waiter.loop, [(command.waiter, error)])
        else:
            self._waiters[command.prepared.request_id] = command.waiter

    def _deliver(self, events: Sequence[Event]) -> None:
        """Wake each event loop once, with all that is for it."""
        batches: defaultdict[asyncio.AbstractEventLoop, list[tuple[_Waiter, Event]]]
        batches = defaultdict(list)
        for event in events:
            waiter = self._waiters.get(event.request_id)
            if waiter is not None:
                batches[waiter.loop].append((waiter, event))
                if _is_last(event):
                    del self._waiters[event.request_id]
        for loop, batch in batches.items():
            if not _send(loop, batch):
                self._abandon(loop)

    def _abandon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Nobody can be told anything in a loop that is closed."""
        for request_id in [name for name, w in self._waiters.items() if w.loop is loop]:
            del self._waiters[request_id]
            self._engine.abort(request_id)

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
        waiters = list(self._waiters.values())
        self._waiters.clear()
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, _Start):
                waiters.append(command.waiter)
        try:
            self._engine.abort_all()
            self._engine.take_events()
            self._stats = self._engine.stats()
        finally:
            for waiter in waiters:
                _send(waiter.loop, [(waiter, self._stop_error())])

    def _stop_error(self) -> EngineStoppedError:
        if self._failure is None:
            if self._stopped:
                return EngineStoppedError("the engine was closed")
            return EngineStoppedError(
                "the engine runs in the process that made it, and this is a fork of that; "
                "make one here"
            )
        error = EngineStoppedError(f"the engine stopped: {self._failure!r}")
        error.__cause__ = self._failure
        return error


_RUNNING: "weakref.WeakSet[AsyncEngine]" = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Let no step run while the interpreter goes: a thread that it stops amid one takes the process
    down.
    """
    running = list(_RUNNING)
    for engine in running:
        engine._commands.put(None)
    for engine in running:
        engine._thread.join()


class _Waiter:
    """Whoever reads a request's events, and the event loop to reach it in."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.queue: asyncio.Queue[Event | Exception] = asyncio.Queue()


class _Start(NamedTuple):
    prepared: PreparedRequest
    waiter: _Waiter


class _Leave(NamedTuple):
    """The iterator of a request was left."""

    request_id: str
    waiter: _Waiter


class _Abort(NamedTuple):
    request_id: str


def _is_last(event: Event) -> bool:
    return isinstance(event, FinishEvent) and event.last


def _send(
    loop: asyncio.AbstractEventLoop, batch: Sequence[tuple[_Waiter, Event | Exception]]
) -> bool:
    """Put items into their queues, in the loop's own thread. False: the loop is closed."""

    def put() -> None:
        for waiter, item in batch:
            waiter.queue.put_nowait(item)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:
        return False
    return True
