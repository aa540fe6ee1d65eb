"""Save a model to a folder and load it back, bit for bit and strictly.

A model folder::

    config.json        {"model_type": "dualflow", "format_version": 1, "config": {...}}, the last
                       with the fields of spec.ModelConfig
    model.safetensors  the primary: a whole causal language model under Hugging Face's Llama names
    aux.safetensors    what the auxiliary flow adds (names that contain ".aux."), where it does
    tokenizer.json     of the `tokenizers` library; optional
    metrics.json       val_loss (of r), val_loss_p, val_loss_q in nats per token; optional
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualflow import config as configuration
from dualflow.checkpoint.atomic import atomic_folder, write_atomic
from dualflow.checkpoint.locate import (
    FORMAT_VERSION,
    MODEL_TYPE,
    find_model_folder,
    is_model_folder,
    missing_weights,
    read_json,
    read_model_config,
)
from dualflow.checkpoint.tensors import FLOATS, TensorEntry, load_tensors, read_header, save_tensors
from dualflow.data.tokenizers import Tokenizer, load_tokenizer
from dualflow.model import CausalLM, build_model
from dualflow.spec import ModelConfig

PRIMARY_FILE = "model.safetensors"
AUX_FILE = "aux.safetensors"

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing put before the names of what they wrap."""


def save_model(
    model: nn.Module,
    folder: str | Path,
    *,
    tokenizer_json: str | Path | None = None,
    metrics: Mapping[str, Any] | None = None,
) -> None:
    """Write ``model`` to ``folder`` atomically, replacing an earlier model there.

    tokenizer_json: the text of a tokenizer.json, or the ``Path`` of one.
    metrics:        flat numbers, by convention ``val_loss``, ``val_loss_p``, ``val_loss_q``;
                    not-a-number becomes null.

    A model wrapped by torch.compile or DistributedDataParallel is saved under the same names as a
    bare one. Raises ``ValueError`` where ``folder`` is a file or holds something that is not a
    model.
    """
    with atomic_folder(folder, replaceable=is_model_folder) as temporary:
        write_model(model, temporary, tokenizer_json=tokenizer_json, metrics=metrics)


def write_model(
    model: nn.Module,
    folder: Path,
    *,
    tokenizer_json: str | Path | None = None,
    metrics: Mapping[str, Any] | None = None,
) -> None:
    """Write a model's files into an existing ``folder``, such as one of ``atomic_folder``'s."""
    bare = _unwrap(model)
    tensors = _stored_tensors(bare)
    save_tensors(
        folder / PRIMARY_FILE, {name: t for name, t in tensors.items() if not _is_aux(name)}
    )
    if aux := {name: t for name, t in tensors.items() if _is_aux(name)}:
        save_tensors(folder / AUX_FILE, aux)
    if tokenizer_json is not None:
        _write_text(folder / "tokenizer.json", _tokenizer_text(tokenizer_json))
    if metrics is not None:
        _write_json(folder / "metrics.json", _finite(metrics))
    fields = configuration.to_dict(bare.config)
    _write_json(
        folder / "config.json",
        {"model_type": MODEL_TYPE, "format_version": FORMAT_VERSION, "config": fields},
    )


def load_model(
    folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> CausalLM:
    """The model in ``folder``, in eval mode.

    folder: a model folder, or a run folder: its final model, else its newest checkpoint.
    dtype:  the floating-point format to load as; None keeps each tensor as it is stored.

    Raises ``ValueError`` where anything is missing, unexpected, of another shape or number format,
    damaged, of another kind of model, or too large for the ``dtype`` asked for; every message names
    the file and the tensors.
    """
    place = find_model_folder(folder)
    config = read_config(place)
    headers = _read_headers(place)
    stored = {name: entry for header in headers.values() for name, entry in header.items()}
    flows = max(1, config.num_flows)  # one without tensors of its own in a layer is possible
    if config.num_layers > len(stored) or config.num_layers * flows > 16 * len(stored):
        raise ValueError(
            f"{place}: config.json has num_layers {config.num_layers:,} and "
            f"{config.num_flows:,} auxiliary flows, the files {len(stored):,} tensors"
        )
    _check_strict(place, _expected_shapes(place, config), headers)
    model = build_model(config, None, device, dtype or _main_dtype(stored))
    parameters = _stored_tensors(model)
    with torch.no_grad():
        for file in headers:
            for name, tensor in load_tensors(place / file).items():
                _assign(parameters[name], tensor, dtype, f"{place / file}: {name}")
    return model.eval()


def read_config(folder: str | Path) -> ModelConfig:
    """The configuration of a model or run folder. Raises ``ValueError`` as ``load_model`` does."""
    place = find_model_folder(folder)
    table = read_model_config(place)
    try:
        return configuration.from_dict(ModelConfig, table.get("config", {}))
    except ValueError as error:
        raise ValueError(f"{place / 'config.json'}: config.{error}") from error


def read_metrics(folder: str | Path) -> dict[str, Any]:
    """What metrics.json of a model folder or run folder holds; empty where there is none."""
    path = find_model_folder(folder) / "metrics.json"
    return read_json(path) if path.exists() else {}


def load_tokenizer_of(folder: str | Path) -> Tokenizer:
    """The tokenizer of a model or run folder. Raises ``ValueError``: it is missing or damaged."""
    place = find_model_folder(folder)
    read_model_config(place)  # what is no model at all is told first
    if not (place / "tokenizer.json").is_file():
        raise ValueError(
            f"tokenizer.json is missing in {place}: the model can be loaded, but not fed with text"
        )
    return load_tokenizer(place)


def _read_headers(place: Path) -> dict[str, dict[str, TensorEntry]]:
    if not (place / PRIMARY_FILE).exists():
        raise ValueError(missing_weights(place))
    return {
        file: read_header(place / file)
        for file in (PRIMARY_FILE, AUX_FILE)
        if (place / file).exists()
    }


def _expected_shapes(place: Path, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """What ``config`` needs, found without the memory for it: a config that lies costs nothing."""
    try:
        model = build_model(config, device="meta")
    except (RuntimeError, OverflowError, MemoryError) as error:
        raise ValueError(
            f"{place / 'config.json'} describes a model that cannot be built: {error}"
        ) from error
    return {name: tuple(tensor.shape) for name, tensor in _stored_tensors(model).items()}


def _check_strict(
    place: Path,
    expected: Mapping[str, tuple[int, ...]],
    headers: Mapping[str, Mapping[str, TensorEntry]],
) -> None:
    problems: list[str] = []
    for file, belongs in ((PRIMARY_FILE, False), (AUX_FILE, True)):
        wanted = {name: shape for name, shape in expected.items() if _is_aux(name) == belongs}
        found = headers.get(file)
        if found is None:
            problems += [f"{file} is missing (with {_few(wanted)})"] if wanted else []
            continue
        prefixes = sorted({prefix for name in found if (prefix := _wrapper_prefix(name))})
        if prefixes:
            listed = ", ".join(map(repr, prefixes))
            problems.append(
                f"{file}: names begin with {listed}, put there by a wrapper "
                "(torch.compile, DistributedDataParallel); save the bare model under its own names"
            )
            continue
        problems += _compare(file, wanted, found)
    if problems:
        raise ValueError(f"{place} does not fit its config.json: " + "; ".join(problems))


def _compare(
    file: str, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, TensorEntry]
) -> list[str]:
    problems: list[str] = []
    if missing := wanted.keys() - found.keys():
        problems.append(f"{file}: missing {_few(missing)}")
    if unexpected := found.keys() - wanted.keys():
        problems.append(f"{file}: unexpected {_few(unexpected)}")
    both = sorted(wanted.keys() & found.keys())
    if shapes := [
        f"{n} {list(found[n].shape)}, expected {list(wanted[n])}"
        for n in both
        if found[n].shape != wanted[n]
    ]:
        problems.append(f"{file}: other shape: {_few(shapes, sort=False)}")
    if dtypes := [f"{n} ({found[n].dtype})" for n in both if found[n].dtype not in FLOATS]:
        problems.append(f"{file}: not one of {', '.join(FLOATS)}: {_few(dtypes, sort=False)}")
    return problems


def _few(names: Iterable[str], sort: bool = True) -> str:
    listed = sorted(names) if sort else list(names)
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return ", ".join(listed[:8]) + more


def _wrapper_prefix(name: str) -> str | None:
    for prefix in ("module.", *_WRAPPERS):
        if name.startswith(prefix) or (prefix in _WRAPPERS and f".{prefix}" in name):
            return prefix
    return None


def _main_dtype(stored: Mapping[str, TensorEntry]) -> torch.dtype:
    """The format of most weights: what the model is built in before each tensor gets its own."""
    sizes: dict[str, int] = {}
    for entry in stored.values():
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + math.prod(entry.shape)
    return FLOATS[max(sizes, key=lambda name: sizes[name])]


def _assign(parameter: Tensor, tensor: Tensor, dtype: torch.dtype | None, name: str) -> None:
    """Copy ``tensor`` into ``parameter`` as ``dtype`` (None: as stored); overflow is an error."""
    wanted = dtype or tensor.dtype
    converted = tensor.to(wanted)
    if torch.finfo(wanted).max < torch.finfo(tensor.dtype).max:
        lost = tensor[tensor.isfinite() & ~converted.isfinite()]
        if len(lost):
            raise ValueError(
                f"{name}: {len(lost):,} of {tensor.numel():,} values are too large for {wanted} "
                f"(the largest is {float(lost.abs().max()):.3g}); load it as float32 or bfloat16"
            )
    if parameter.dtype == wanted:
        parameter.copy_(converted)
    else:
        parameter.data = converted.to(parameter.device)


def _stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors by canonical name, each once: a tied head goes by the embedding's name."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            tensors[name] = tensor
    return tensors


def _unwrap(model: nn.Module) -> CausalLM:
    while not isinstance(model, CausalLM):
        inner = getattr(model, "_orig_mod", getattr(model, "module", None))
        if not isinstance(inner, nn.Module):
            raise TypeError(
                f"save_model got a {type(model).__name__}; expected a dualflow CausalLM"
            )
        model = inner
    return model


def _is_aux(name: str) -> bool:
    return ".aux." in name


def _tokenizer_text(tokenizer_json: str | Path) -> str:
    is_file = isinstance(tokenizer_json, Path)
    text = tokenizer_json.read_text(encoding="utf-8") if is_file else tokenizer_json
    if not text.lstrip().startswith("{"):
        raise ValueError(
            f"tokenizer_json begins {text[:40]!r}; "
            "expected the text of a tokenizer.json, or its Path"
        )
    return text


def _finite(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: a run that diverged must still save its checkpoint."""
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()
    }


def _write_json(path: Path, value: Any) -> None:
    _write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _write_text(path: Path, text: str) -> None:
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
