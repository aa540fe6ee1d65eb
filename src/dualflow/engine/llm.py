"""A model in this process: ``LLM(path).generate(prompts)``."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any, Self, cast

from dualflow.checkpoint import find_model_folder
from dualflow.config import from_dict
from dualflow.data.chat import ChatTemplate, load_chat_template
from dualflow.data.tokenizers import Tokenizer
from dualflow.engine.build import build_engine
from dualflow.engine.config import EngineConfig
from dualflow.engine.engine import Engine
from dualflow.engine.interrupt import InterruptLater
from dualflow.engine.outputs import Event, FinishEvent, OutputCollector, RequestOutput
from dualflow.engine.request import RequestError, RequestParams
from dualflow.engine.sequences import PreparedRequest
from dualflow.model import CausalLM

Prompt = str | Sequence[int]
"""A text, or its token ids."""


class LLM:
    """Generates with one model, many prompts at once. For one thread at a time.

    model:      a model folder or run folder, or a model in memory; then with its ``tokenizer``,
                or without one: prompts are ids.
    settings:   fields of ``EngineConfig``.

    Raises ``ValueError``: what is wrong with the folder, or which setting is not possible, and why.
    """

    def __init__(
        self, model: str | Path | CausalLM, tokenizer: Tokenizer | None = None, **settings: Any
    ) -> None:
        config = from_dict(EngineConfig, settings)
        self._folder: Path | None = None
        self._template: ChatTemplate | None = None
        if isinstance(model, CausalLM):
            self._engine: Engine | None = build_engine(model, tokenizer, config)
        elif tokenizer is not None:
            raise ValueError("a model folder brings its own tokenizer; leave tokenizer out")
        else:
            self._folder = find_model_folder(model)
            self._engine = Engine.load(self._folder, config)
        self._boxes: dict[str, deque[Event]] = {}

    @property
    def engine(self) -> Engine:
        """The engine beneath, for its ``stats`` and settings."""
        if self._engine is None:
            raise RuntimeError("this LLM was closed; make a new one")
        return self._engine

    def close(self) -> None:
        """End what runs and let go of the model. Twice is fine."""
        if self._engine is not None:
            self._engine.abort_all()
            self._engine = None
            self._boxes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: RequestParams | Sequence[RequestParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs are in the order of the prompts.

        prompts: one prompt or several; no matter if some are equal.
        params:  for all of them, or one for each.

        Raises ``RequestError`` naming the prompt, before anything runs. A request that fails later
        has outputs whose ``finish_reason`` is ``error``. Ctrl-C ends them all.
        """
        outputs = dict(self.generate_as_completed(prompts, params))
        return [outputs[index] for index in range(len(outputs))]

    def generate_as_completed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: RequestParams | Sequence[RequestParams] | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """``generate``, each output as soon as it is whole, with the index of its prompt. The call
        itself raises what is wrong with a prompt; whoever leaves early ends the rest.
        """
        listed = _as_list(prompts)
        prepared = [
            self._prepare(index, prompt, of_prompt)
            for index, (prompt, of_prompt) in enumerate(
                zip(listed, _params_of_each(params, len(listed)), strict=True)
            )
        ]
        return self._complete(listed, prepared)

    def stream(self, prompt: Prompt, params: RequestParams | None = None) -> Iterator[Event]:
        """Continue one prompt, event by event. Several streams may be read in turns: their
        requests share the steps. The call itself raises what is wrong with the request; whoever
        leaves early ends it.
        """
        return self._stream(self.engine.prepare(prompt, params))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: RequestParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> RequestOutput:
        """The model's answer to a conversation: messages with ``role`` and ``content``.

        Raises ``ValueError``: the model has no chat template, or it refuses the conversation.
        """
        (output,) = self.generate(self.encode_chat(messages, tools=tools), params)
        return output

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """The ids of a conversation up to where the model's answer begins, as ``chat`` uses them:
        for ``stream`` and ``generate``. Control tokens' names in a message stay text.
        """
        if self._template is None:
            if self._folder is None or self.engine.tokenizer is None:
                raise ValueError(
                    "this model has no chat template; load it from a folder that has one, "
                    "with its tokenizer"
                )
            self._template = load_chat_template(self._folder, self.engine.tokenizer)
        return self._template.encode(messages, tools=tools)

    def _complete(
        self, prompts: list[Prompt], prepared: list[PreparedRequest]
    ) -> Iterator[tuple[int, RequestOutput]]:
        box: deque[Event] = deque()
        waiting: dict[str, tuple[int, OutputCollector]] = {}
        try:
            for index, (prompt, request) in enumerate(zip(prompts, prepared, strict=True)):
                text = prompt if isinstance(prompt, str) else None
                collector = OutputCollector(request.request_id, text, request.prompt_ids)
                waiting[request.request_id] = index, collector
                with _naming(index):
                    self._submit(request, box)
            while waiting:
                while not box:
                    self._pump()
                event = box.popleft()
                index, collector = waiting[event.request_id]
                collector.add(event)
                if collector.finished:
                    del waiting[event.request_id]
                    yield index, collector.output()
        finally:
            self._drop(request.request_id for request in prepared)

    def _stream(self, prepared: PreparedRequest) -> Iterator[Event]:
        try:
            box: deque[Event] = deque()
            self._submit(prepared, box)
            while True:
                while not box:
                    self._pump()
                event = box.popleft()
                yield event
                if isinstance(event, FinishEvent) and event.last:
                    return
        finally:
            self._drop([prepared.request_id])

    def _prepare(self, index: int, prompt: Prompt, params: RequestParams | None) -> PreparedRequest:
        with _naming(index):
            return self.engine.prepare(prompt, params)

    def _submit(self, prepared: PreparedRequest, box: deque[Event]) -> None:
        with InterruptLater():
            self.engine.submit(prepared)
            self._boxes[prepared.request_id] = box

    def _pump(self) -> None:
        """One step; its events go to whoever waits for them."""
        with InterruptLater():
            assert self.engine.has_work, "a request is waited for, and nothing runs"
            self._hand_out(self.engine.step())

    def _drop(self, request_ids: Iterable[str]) -> None:
        """Nobody waits for these any more."""
        if self._engine is None:
            return
        with InterruptLater():
            for request_id in request_ids:
                if self._boxes.pop(request_id, None) is not None:
                    self._engine.abort(request_id)
            self._hand_out(self._engine.take_events())

    def _hand_out(self, events: Iterable[Event]) -> None:
        for event in events:
            if (box := self._boxes.get(event.request_id)) is not None:
                box.append(event)


@contextmanager
def _naming(index: int) -> Iterator[None]:
    """Say which prompt an error is about."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"prompt {index}: {error}") from error


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | bytes | bytearray | Mapping):
        return [cast(str, prompts)]
    try:
        # An array's own list has plain numbers in it, whatever it is an array of.
        listed = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)  # type: ignore[attr-defined]
    except TypeError as error:
        raise RequestError(
            f"the prompts are {prompts!r}; expected a text, token ids, or several of those"
        ) from error
    if listed and all(isinstance(item, Integral) for item in listed):
        return [cast(list[int], listed)]
    return cast(list[Prompt], listed)


def _params_of_each(
    params: RequestParams | Sequence[RequestParams] | None, count: int
) -> Sequence[RequestParams | None]:
    if params is None or isinstance(params, RequestParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} params for {count} prompts; expected one for each")
    return params
