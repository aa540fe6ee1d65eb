"""From a model and settings to an engine: backend, number formats, size of the cache."""

import logging
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from dualflow.checkpoint import find_model_folder, load_model, load_tokenizer_of, read_metrics
from dualflow.data.tokenizers import Tokenizer
from dualflow.engine.config import EngineConfig
from dualflow.engine.engine import Engine
from dualflow.engine.executor import Executor
from dualflow.engine.kv_cache import KVDtype
from dualflow.engine.torch_executor import TorchExecutor
from dualflow.model import CausalLM
from dualflow.model.device import pick_device
from dualflow.model.quantise import quantise_model
from dualflow.plan.roofline import Machine, model_work
from dualflow.spec import ModelConfig

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_LOG = logging.getLogger(__name__)
_NATIVE = "dualflow.engine.native_executor"
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1.07, "int4": 0.63}
# What the kernel library reaches on two cores; only the ratio of the first two matters.
_NATIVE_MACHINE = Machine(bytes_per_second=40e9, flops_per_second=300e9, seconds_per_pass=1e-4)


def load_engine(path: str | Path, config: EngineConfig) -> Engine:
    """An engine for the model in a model or run folder. Raises ``ValueError`` (``Engine.load``)."""
    folder = find_model_folder(path)
    device = pick_device(config.device)
    model = load_model(folder, device=device, dtype=_DTYPES.get(config.weights))
    if model.quantised is not None and config.weights not in ("auto", model.quantised):
        raise ValueError(
            f"weights is {config.weights!r}, and {folder} holds {model.quantised}, which cannot be "
            "turned back; leave weights out, or load the model it was made from"
        )
    if config.weights in ("int8", "int4") and model.quantised is None:
        model = quantise_model(model, config.weights)
    has_tokenizer = (folder / "tokenizer.json").is_file()
    tokenizer = load_tokenizer_of(folder) if has_tokenizer else None
    return build_engine(model, tokenizer, config, metrics=read_metrics(folder))


def build_engine(
    model: CausalLM,
    tokenizer: Tokenizer | None = None,
    config: EngineConfig | None = None,
    *,
    metrics: Mapping[str, Any] | None = None,
) -> Engine:
    """An engine for a model in memory, on the device it is on and in its number format:
    ``config.device`` and ``config.weights`` are for ``load_engine``.

    Raises ``ValueError``: a setting is not possible, and why.
    """
    config = config or EngineConfig()
    if tokenizer is not None and tokenizer.vocab_size > model.config.num_real_tokens:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model "
            f"{model.config.num_real_tokens}; they do not belong together"
        )
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    kv_dtype = cache_format(model, config)
    config = replace(config, num_pages=number_of_pages(model, config, kv_dtype), cache_bytes=None)
    executor = _executor(model.eval(), config, kv_dtype)
    # What runs is what the engine says it is.
    backend = "torch" if isinstance(executor, TorchExecutor) else "native"
    config = replace(config, backend=backend)
    work = model_work(model.config, _BYTES[weights_format(model)], _BYTES[kv_dtype])
    machine = _NATIVE_MACHINE if backend == "native" else Machine()
    return Engine(
        executor, model.config, tokenizer, config, metrics=metrics, work=work, machine=machine
    )


def bytes_per_page(config: ModelConfig, page_size: int, kv_dtype: KVDtype) -> int:
    """Bytes of a page: keys and values of all layers. A dual-flow model has those of its
    primary alone.
    """
    heads = 2 * config.num_layers * config.kv_heads * page_size
    size = {"float64": 8, "float32": 4, "bfloat16": 2, "int8": 1}[kv_dtype]
    scale = 4 if kv_dtype == "int8" else 0
    return heads * (config.head_size * size + scale)


def device_of(model: CausalLM) -> torch.device:
    """Where a model is: a norm's gain tells, as matrices may be quantised."""
    return next(model.model.norm.parameters()).device


def weights_format(model: CausalLM) -> str:
    """The number format of a model's matrices, as ``EngineConfig.weights`` names it."""
    if model.quantised is not None:
        return model.quantised
    return str(model.lm_head.weight.dtype).removeprefix("torch.")


def cache_format(model: CausalLM, config: EngineConfig) -> KVDtype:
    """The number format of the cache that ``config`` means for ``model``."""
    if config.kv_dtype != "auto":
        return config.kv_dtype
    weights = weights_format(model)
    return weights if weights in ("float64", "float32") else "bfloat16"


def number_of_pages(model: CausalLM, config: EngineConfig, kv_dtype: KVDtype) -> int:
    """How many pages the cache gets; warns where it cannot hold one text of the model's length."""
    page = bytes_per_page(model.config, config.page_size, kv_dtype)
    positions = model.config.max_position
    if config.num_pages is not None:
        pages = config.num_pages
    elif config.cache_bytes is not None:
        pages = config.cache_bytes // page
        if not pages:
            raise ValueError(
                f"cache_bytes is {config.cache_bytes:,}, and one page takes {page:,}; "
                "give more, or make page_size smaller"
            )
    else:
        wanted = config.max_running * -(-positions // config.page_size)
        device = device_of(model)
        pages = max(1, min(wanted, _spare_bytes(device) // page))
    _require_memory(pages * page, device_of(model))
    if pages * config.page_size < positions:
        warnings.warn(
            f"the cache holds {pages * config.page_size:,} tokens, fewer than the model's "
            f"{positions:,} positions: longer texts end with the reason 'cache' "
            "(num_pages or cache_bytes makes it larger)",
            stacklevel=4,
        )
    return pages


def _executor(model: CausalLM, config: EngineConfig, kv_dtype: KVDtype) -> Executor:
    assert config.num_pages is not None
    sizes = {"num_pages": config.num_pages, "page_size": config.page_size}
    if config.backend != "torch":
        reason = _native_unsupported(model, kv_dtype)
        try:
            if reason is None:
                return import_module(_NATIVE).NativeExecutor(
                    model, **sizes, kv_dtype=kv_dtype, weights=weights_format(model),
                    threads=config.threads,
                )  # fmt: skip
        except ValueError as error:  # such as a page size that the kernels do not have
            reason = str(error)
        if config.backend == "native":
            raise ValueError(f"backend is 'native', which is not possible here: {reason}")
        _LOG.info("backend torch, because native is not possible: %s", reason)
    return TorchExecutor(model, **sizes, kv_dtype=kv_dtype)


def _native_unsupported(model: CausalLM, kv_dtype: KVDtype) -> str | None:
    """Why the kernel library cannot run this model here; None: it can."""
    try:
        native = import_module(_NATIVE)
    except ImportError as error:
        return f"the kernel library is not there ({error})"
    device = device_of(model)
    if device.type != "cpu":
        return f"the kernel library runs on the CPU, and the model is on {device.type}"
    if kv_dtype == "float64":
        return "its cache takes float32, bfloat16 and int8, and kv_dtype is float64"
    return native.unsupported(model)


def _require_memory(cache_bytes: int, device: torch.device) -> None:
    """Refuse a cache that no swapping would make room for: memory is only taken as pages are used,
    so it would end the process amid its work.
    """
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if cache_bytes > there:
        raise ValueError(
            f"the cache would take {cache_bytes:,} bytes, and there are {there:,} in all; "
            "make num_pages or cache_bytes smaller"
        )


def _spare_bytes(device: torch.device) -> int:
    """The share of free memory that a cache may take unasked."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return _free_memory() // 4


def _free_memory() -> int:
    """Bytes that could be allocated without swapping; half of what is installed where the system
    does not say.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        table = dict(line.split(":", 1) for line in lines)
        free = int(table["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:  # a container may have less
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or the limit is "max"
        return free
    return min(free, max(0, limit - used))
