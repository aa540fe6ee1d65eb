"""Small engines over tiny models, and what comes out of them."""

from collections.abc import Callable, Iterable
from typing import Any

from dualflow.data.tokenizers import Tokenizer
from dualflow.engine import Engine, EngineConfig, build_engine
from dualflow.engine.outputs import Event, FinishEvent, OutputCollector, RequestOutput
from dualflow.model import CausalLM

LETTERS = frozenset(range(ord("a"), ord("f")))
"""Ids of the tokenizer ``bytes`` that a random model may be held to, so that it writes text."""


def tiny_engine(model: CausalLM, tokenizer: Tokenizer | None = None, **settings: Any) -> Engine:
    """An engine on the reference backend with 64 pages of 4 tokens, but for ``settings``."""
    fields: dict[str, Any] = {"backend": "torch", "num_pages": 64, "page_size": 4}
    return build_engine(model, tokenizer, EngineConfig(**(fields | settings)))


def run_all(
    engine: Engine, request_ids: Iterable[str], before_step: Callable[[int], None] | None = None
) -> dict[str, RequestOutput]:
    """Step until nothing is left to do, and assert that nothing is left behind; the outputs of
    these requests. ``before_step`` is called with the number of each step.
    """
    collectors = {name: OutputCollector(name, None, ()) for name in request_ids}
    for step in range(100_000):
        if before_step is not None:
            before_step(step)
        if not engine.has_work:
            break
        for event in engine.step():
            if event.request_id in collectors:
                collectors[event.request_id].add(event)
    engine.check_idle()
    return {name: collector.output() for name, collector in collectors.items()}


def ends_of(events: Iterable[Event]) -> list[FinishEvent]:
    """The events that end an output."""
    return [event for event in events if isinstance(event, FinishEvent)]
