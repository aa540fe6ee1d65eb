"""The engine: requests go in, events come out, one model step at a time.

Not for several threads at once: ``AsyncEngine`` gives it one of its own. ``prepare`` alone touches
nothing that changes, and may be called from anywhere.
"""

import itertools
import threading
import time
import warnings
from collections.abc import Mapping
from collections.abc import Sequence as Ids
from dataclasses import replace
from pathlib import Path
from random import SystemRandom
from typing import Any

from dualflow.data.detokenize import TokenTexts
from dualflow.data.tokenizers import Tokenizer
from dualflow.engine.admission import (
    check_kinds,
    check_params,
    check_prompt,
    new_tokens_limit,
    require_characters,
)
from dualflow.engine.config import EngineConfig
from dualflow.engine.counts import Counts
from dualflow.engine.executor import Executor
from dualflow.engine.outputs import EngineStats, Event
from dualflow.engine.request import SEED_END, Request, RequestError, RequestParams
from dualflow.engine.runner import Runner
from dualflow.engine.sampler import GrammarState, RequestSampler
from dualflow.engine.scheduler import Scheduler
from dualflow.engine.scheduler_config import SchedulerConfig
from dualflow.engine.sequences import PreparedRequest, Sequence
from dualflow.engine.step_plan import SequenceResult, StepPlan, StepResult
from dualflow.engine.structured import StructuredOutputs
from dualflow.engine.text import TextStream
from dualflow.model.generate import aux_off_warning
from dualflow.plan.roofline import Machine, ModelWork
from dualflow.spec import ModelConfig


class Engine:
    """Serves requests with one model.

    executor:  the model and its cache of ``config.num_pages`` pages of ``config.page_size``.
    tokenizer: None: prompts are ids, there is no text, and no stop strings.
    metrics:   the model's recorded losses, for the warning about ``aux = off``.
    work, machine: what a pass costs, for the choice between grouped and lazy execution.
    """

    def __init__(
        self,
        executor: Executor,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        *,
        metrics: Mapping[str, Any] | None = None,
        work: ModelWork | None = None,
        machine: Machine | None = None,
    ) -> None:
        if config.num_pages is None:
            raise ValueError("num_pages is not set; expected the executor's number of pages")
        self.config, self.model_config, self.tokenizer = config, model_config, tokenizer
        self.aux_off_warning = aux_off_warning(dict(metrics or {}))
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._executor = executor
        self._runner = Runner(executor, model_config, work=work, machine=machine)
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_pages=config.num_pages,
                page_size=config.page_size,
                max_running=config.max_running,
                max_step_tokens=config.max_step_tokens,
                max_waiting=config.max_waiting,
                prefix_cache=config.prefix_cache,
                model_key=str(model_config),
            )
        )
        self._groups: dict[str, PreparedRequest] = {}
        self._sequences: dict[str, Sequence] = {}
        self._pending: list[Event] = []
        self._warned = False
        self._lock = threading.Lock()
        self._structured: StructuredOutputs | None = None
        self._counts = Counts()
        self._arrivals, self._names = itertools.count(), itertools.count()
        self._seeds = SystemRandom()

    @classmethod
    def load(cls, path: str | Path, config: EngineConfig | None = None) -> "Engine":
        """An engine for the model in a model or run folder, with the tokenizer it brings.

        Raises ``ValueError``: what is wrong with the folder, or why a setting is not possible.
        """
        from dualflow.engine.build import load_engine

        return load_engine(path, config or EngineConfig())

    # Requests.

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with what the tokenizer puts before a text. Where that is nothing,
        those of an empty text are the end-of-text id, after which every text begins.

        Raises ``RequestError`` where there is no tokenizer, or the text holds half a surrogate
        pair.
        """
        if self.tokenizer is None:
            raise RequestError("the prompt is a text, and this engine has no tokenizer")
        require_characters(text)
        ids = [*self.tokenizer.before_ids, *self.tokenizer.encode(text)]
        return ids or [self.tokenizer.eos_id]

    def prepare(
        self,
        prompt: str | Ids[int],
        params: RequestParams | None = None,
        *,
        request_id: str | None = None,
        tenant: str = "",
    ) -> PreparedRequest:
        """Check a request and make what serving it takes, without starting it.

        A grammar is compiled here, which may take a while. Raises ``RequestError``.
        """
        params = RequestParams() if params is None else params
        check_kinds(params, request_id, tenant)
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        prompt_ids = check_prompt(ids, self.model_config)
        check_params(params, self.model_config, has_tokenizer=self.tokenizer is not None)
        if params.aux.kind == "off":
            self._warn_about_aux_off()
        name = request_id if request_id is not None else f"request-{next(self._names)}"
        prepared = PreparedRequest(name, prompt_ids, num_open=params.n)
        seed = self._seeds.randrange(SEED_END) if params.seed is None else params.seed
        for index in range(params.n):
            prepared.sequences.append(self._sequence(prepared, params, index, seed, tenant))
        return prepared

    def submit(self, prepared: PreparedRequest) -> str:
        """Start a prepared request; returns its id.

        Raises ``RequestError``: its id is one of a request that runs, or it can never fit.
        """
        if prepared.request_id in self._groups:
            raise RequestError(f"the request id {prepared.request_id!r} is in use")
        prepared.time = time.perf_counter()
        added: list[Request] = []
        try:
            for sequence in prepared.sequences:
                sequence.request.arrival = next(self._arrivals)
                self._scheduler.add(sequence.request)
                added.append(sequence.request)
        except RequestError:
            for request in added:
                self._scheduler.abort(request.id)
            self._scheduler.take_finished()
            raise
        self._groups[prepared.request_id] = prepared
        for sequence in prepared.sequences:
            self._sequences[sequence.request.id] = sequence
            self._runner.add(sequence.request, sequence.sampler)
        return prepared.request_id

    def add(
        self,
        prompt: str | Ids[int],
        params: RequestParams | None = None,
        *,
        request_id: str | None = None,
        tenant: str = "",
    ) -> str:
        """Start a request; returns its id. Raises ``RequestError``."""
        return self.submit(self.prepare(prompt, params, request_id=request_id, tenant=tenant))

    def abort(self, request_id: str) -> bool:
        """End a request, in whatever state; the next step reports it. False: there is no such
        request, or not any more.
        """
        group = self._groups.get(request_id)
        if group is None:
            return False
        for sequence in group.sequences:
            if sequence.request.id in self._sequences:
                self._scheduler.abort(sequence.request.id)
        self._collect_finished(self._pending)
        return True

    def abort_all(self) -> None:
        """End every request."""
        for request_id in list(self._groups):
            self.abort(request_id)

    # Steps.

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do or to report."""
        return bool(self._sequences or self._pending)

    def step(self) -> list[Event]:
        """Run at most one model step; returns what happened since the last.

        A request that fails alone ends with the reason ``error``, and the others go on. Where the
        whole step fails, its requests end so and the exception comes out.
        """
        events, self._pending = self._pending, []
        try:
            plan = self._scheduler.plan()
            if plan is not None:
                self._run(plan, events)
        except BaseException:
            self._pending = events + self._pending  # what has ended must be told
            raise
        self._collect_finished(events)
        return events

    def take_events(self) -> list[Event]:
        """What the next step would report of what has happened already, such as aborts."""
        events, self._pending = self._pending, []
        return events

    def _run(self, plan: StepPlan, events: list[Event]) -> None:
        try:
            result = self._runner.run(plan)
        except BaseException as error:
            failed = _all_failed(plan, f"the step failed: {error!r}")
            self._take(plan, failed, events)
            self._collect_finished(events)
            raise
        self._counts.add_step(plan, result)
        self._take(plan, result, events)

    def _take(self, plan: StepPlan, result: StepResult, events: list[Event]) -> None:
        """Hand a step's result to the scheduler, and report what stands of it."""
        stand = self._scheduler.apply(plan, result)
        now = time.perf_counter()
        for planned, got, count in zip(plan.sequences, result.sequences, stand, strict=True):
            sequence = self._sequences[planned.request_id]
            if got.prompt:
                sequence.group.add_prompt(planned, got)
            self._counts.new_tokens += sequence.advance(got, count, now, events)
            if sequence.text.stopped is not None or sequence.sampler.at_end:
                self._scheduler.finish(planned.request_id, "stop")

    def _sequence(
        self, group: PreparedRequest, params: RequestParams, index: int, seed: int, tenant: str
    ) -> Sequence:
        stop_ids = frozenset(params.stop_ids)
        if self.tokenizer is not None and not params.ignore_eos:
            stop_ids = stop_ids | self.tokenizer.stop_ids
        max_tokens, limit_reason = new_tokens_limit(
            len(group.prompt_ids), params, self.model_config
        )
        first = f"{group.request_id}.0"
        request = Request(
            id=f"{group.request_id}.{index}",
            prompt_ids=group.prompt_ids,
            # The prompt is the same for all outputs, and the first one reports on it.
            params=replace(params, prompt_logprobs=None) if index else params,
            max_tokens=max_tokens,
            limit_reason=limit_reason,
            stop_ids=stop_ids,
            tenant=tenant,
            parent=first if index else None,
        )
        sampler = RequestSampler(
            params,
            vocab_size=self.model_config.vocab_size,
            num_real_tokens=self.model_config.num_real_tokens,
            prompt_ids=group.prompt_ids,
            stop_ids=stop_ids,
            sequence_index=index,
            grammar=self._grammar(params, stop_ids),
            seed=seed,
        )
        text = TextStream(self._texts, params.stop, group.prompt_ids, params.min_tokens)
        return Sequence(request, sampler, text, index, group)

    def _grammar(self, params: RequestParams, stop_ids: frozenset[int]) -> GrammarState | None:
        if params.structured is None:
            return None
        assert self.tokenizer is not None
        with self._lock:
            if self._structured is None:
                self._structured = StructuredOutputs(self.tokenizer, self.model_config.vocab_size)
        return self._structured.start(params.structured, stop_ids)

    def _collect_finished(self, events: list[Event]) -> None:
        now = time.perf_counter()
        for request in self._scheduler.take_finished():
            sequence = self._sequences.pop(request.id)
            self._runner.drop(request.id)
            event = sequence.finish(now)
            if event.last:
                del self._groups[event.request_id]
            self._counts.add_finished(event)
            events.append(event)

    def _warn_about_aux_off(self) -> None:
        """Once for an engine: the model does not change."""
        if self.aux_off_warning is not None and not self._warned:
            self._warned = True
            warnings.warn(self.aux_off_warning, stacklevel=4)

    # Observation.

    def stats(self) -> EngineStats:
        """What runs now, and what was done since the engine was made."""
        s, c = self._scheduler.stats(), self._counts
        return EngineStats(
            waiting=s.waiting, running=s.running, pages_free=s.pages_free,
            pages_cached=s.pages_cached, pages_used=s.pages_used,
            cache_bytes=self._executor.cache_bytes, prefix_hits=s.prefix_hits,
            prefix_queries=s.prefix_queries, preemptions=s.preemptions, steps=dict(c.steps),
            finished=dict(c.finished), prompt_tokens=c.prompt_tokens,
            cached_tokens=c.cached_tokens, new_tokens=c.new_tokens,
            computed_tokens=c.computed_tokens, aux_positions=c.aux_positions, drafted=c.drafted,
            accepted=c.accepted,
        )  # fmt: skip

    def check_idle(self) -> None:
        """Assert that nothing is left behind when nothing runs: every page is free or kept for
        prompts that begin alike, and belongs to nobody.
        """
        assert not self._sequences and not self._groups, "requests are still running"
        self._scheduler.check()
        assert not self._scheduler.requests, "the scheduler knows requests that the engine does not"
        pool = self._scheduler.pool
        assert pool.num_referenced == 0, f"{pool.num_referenced} pages belong to nobody"
        assert pool.num_free + pool.num_cached == self.config.num_pages


def _all_failed(plan: StepPlan, error: str) -> StepResult:
    return StepResult(
        tuple(SequenceResult(planned.request_id, error=error) for planned in plan.sequences)
    )
