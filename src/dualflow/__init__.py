"""Dual-Flow Transformers: more computation for every token a model writes, none for the prompt it
reads.

The names below are imported when they are first used, so ``import dualflow`` itself is instant and
needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualflow.checkpoint import load_model, save_model
    from dualflow.config import ConfigError
    from dualflow.engine import (
        LLM,
        AsyncEngine,
        AuxPolicy,
        EngineConfig,
        RequestError,
        RequestParams,
        StructuredOutput,
    )
    from dualflow.extras import MissingExtraError
    from dualflow.model import CausalLM, build_model
    from dualflow.spec import AuxConfig, ModelConfig, MoEConfig, ReadoutConfig, preset

__version__ = "0.1.0"

__all__ = [
    "AsyncEngine",
    "AuxConfig",
    "AuxPolicy",
    "CausalLM",
    "ConfigError",
    "EngineConfig",
    "LLM",
    "MissingExtraError",
    "MoEConfig",
    "ModelConfig",
    "ReadoutConfig",
    "RequestError",
    "RequestParams",
    "StructuredOutput",
    "__version__",
    "build_model",
    "load_model",
    "preset",
    "save_model",
]

_HOMES = {
    "AsyncEngine": "dualflow.engine",
    "AuxConfig": "dualflow.spec",
    "AuxPolicy": "dualflow.engine",
    "CausalLM": "dualflow.model",
    "ConfigError": "dualflow.config",
    "EngineConfig": "dualflow.engine",
    "LLM": "dualflow.engine",
    "MissingExtraError": "dualflow.extras",
    "MoEConfig": "dualflow.spec",
    "ModelConfig": "dualflow.spec",
    "ReadoutConfig": "dualflow.spec",
    "RequestError": "dualflow.engine",
    "RequestParams": "dualflow.engine",
    "StructuredOutput": "dualflow.engine",
    "build_model": "dualflow.model",
    "load_model": "dualflow.checkpoint",
    "preset": "dualflow.spec",
    "save_model": "dualflow.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # found directly from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
