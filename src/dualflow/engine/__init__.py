"""The inference engine: many requests at once over one paged cache. Importing this package does
not import torch; its names come when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualflow.engine.async_engine import AsyncEngine, EngineClient, EngineStoppedError
    from dualflow.engine.build import build_engine
    from dualflow.engine.config import EngineConfig
    from dualflow.engine.engine import Engine
    from dualflow.engine.llm import LLM
    from dualflow.engine.outputs import (
        EngineStats,
        Event,
        FinishEvent,
        PromptEvent,
        RequestOutput,
        SequenceOutput,
        TokenEvent,
        Usage,
    )
    from dualflow.engine.request import AuxPolicy, RequestError, RequestParams, StructuredOutput
    from dualflow.engine.scheduler_config import QueueFullError
    from dualflow.engine.step_plan import Choice

_HOMES = {
    "AsyncEngine": "async_engine",
    "AuxPolicy": "request",
    "Choice": "step_plan",
    "Engine": "engine",
    "EngineClient": "async_engine",
    "EngineConfig": "config",
    "EngineStats": "outputs",
    "EngineStoppedError": "async_engine",
    "Event": "outputs",
    "FinishEvent": "outputs",
    "LLM": "llm",
    "PromptEvent": "outputs",
    "QueueFullError": "scheduler_config",
    "RequestError": "request",
    "RequestOutput": "outputs",
    "RequestParams": "request",
    "SequenceOutput": "outputs",
    "StructuredOutput": "request",
    "TokenEvent": "outputs",
    "Usage": "outputs",
    "build_engine": "build",
}

__all__ = [
    "AsyncEngine",
    "AuxPolicy",
    "Choice",
    "Engine",
    "EngineClient",
    "EngineConfig",
    "EngineStats",
    "EngineStoppedError",
    "Event",
    "FinishEvent",
    "LLM",
    "PromptEvent",
    "QueueFullError",
    "RequestError",
    "RequestOutput",
    "RequestParams",
    "SequenceOutput",
    "StructuredOutput",
    "TokenEvent",
    "Usage",
    "build_engine",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"dualflow.engine.{_HOMES[name]}"), name)
    globals()[name] = value  # found directly from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
