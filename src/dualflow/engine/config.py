"""How an engine is set up: sizes, number formats, backend. No torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from dualflow.config import ConfigError

Device = Literal["auto", "cpu", "cuda", "mps"]
Weights = Literal["auto", "float64", "float32", "bfloat16", "int8", "int4"]
CacheFormat = Literal["auto", "float64", "float32", "bfloat16", "int8"]
Backend = Literal["auto", "native", "torch"]

_COUNTS = ("page_size", "max_running", "max_step_tokens")
_OPTIONAL_COUNTS = ("num_pages", "cache_bytes", "max_waiting", "threads")
_CHOICES = {
    "weights": get_args(Weights),
    "kv_dtype": get_args(CacheFormat),
    "backend": get_args(Backend),
    "device": get_args(Device),
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine. The defaults suit one model on one machine.

    page_size:        tokens whose keys and values one page holds; our kernels take 16, 32, 64, 128
                      and 256.
    num_pages:        pages of the cache; or ``cache_bytes``: as many as fit into so much. Neither:
                      as many as ``max_running`` requests of the model's full length need, but at
                      most a quarter of the memory that is free (half on an accelerator).
    max_running:      requests in one step at most.
    max_waiting:      requests that wait at most; more are refused. None: no limit.
    max_step_tokens:  primary rows of a step at most: a long prompt is read in chunks of it, so that
                      others' next tokens do not wait for the whole.
    prefix_cache:     keep the pages of finished requests for prompts that begin alike.
    weights:          number format of the matrices; auto: as stored.
    kv_dtype:         number format of the cache; auto: that of the weights, bfloat16 for int8 and
                      int4 ones.
    backend:          ``native``: our kernel library, ``torch``: the reference; auto: native where
                      it can run this model.
    device:           auto: the accelerator where there is one.
    threads:          CPU threads; None: as torch has them.

    Raises ``ConfigError`` naming the field.
    """

    page_size: int = 32
    num_pages: int | None = None
    cache_bytes: int | None = None
    max_running: int = 64
    max_waiting: int | None = None
    max_step_tokens: int = 512
    prefix_cache: bool = True
    weights: Weights = "auto"
    kv_dtype: CacheFormat = "auto"
    backend: Backend = "auto"
    device: Device = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in (*_COUNTS, *_OPTIONAL_COUNTS):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL_COUNTS:
                continue
            least = 0 if name == "max_waiting" else 1
            if type(value) is not int or value < least:
                raise ConfigError(f"{name} is {value!r}; expected a whole number from {least} up")
        if self.num_pages is not None and self.cache_bytes is not None:
            raise ConfigError("num_pages and cache_bytes are both given; give one of them")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}; expected {', '.join(allowed)}"
                )
