"""``EngineConfig``: what it refuses, and how."""

from typing import Any

import pytest

from dualflow.config import ConfigError
from dualflow.engine import EngineConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"page_size": 0}, "page_size is 0; expected a whole number from 1 up"),
        ({"num_pages": 0}, "num_pages is 0"),
        ({"max_running": True}, "max_running is True"),
        ({"max_step_tokens": 1.5}, "max_step_tokens is 1.5"),
        ({"max_waiting": -1}, "max_waiting is -1; expected a whole number from 0 up"),
        ({"threads": 0}, "threads is 0"),
        ({"num_pages": 4, "cache_bytes": 1000}, "give one of them"),
        ({"weights": "int3"}, "weights is 'int3'; expected auto, float64, .*int4"),
        ({"kv_dtype": "fp8"}, "kv_dtype is 'fp8'"),
        ({"backend": "fast"}, "backend is 'fast'; expected auto, native, torch"),
        ({"device": "tpu"}, "device is 'tpu'"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**fields)


def test_nobody_need_wait() -> None:
    assert EngineConfig(max_waiting=0).max_waiting == 0
