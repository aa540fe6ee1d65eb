"""Save a model to a folder and load it back, bit for bit and strictly.

A model folder::

    config.json        {"model_type": "dualflow", "format_version": 1, "config": {...}}, the last
                       with the fields of spec.ModelConfig; where matrices are quantised also
                       "weights": {"format": "int8" or "int4", "group": 32}; of an imported model
                       also "primary_config": its family's own config.json
    model.safetensors  the primary: a whole causal language model under Hugging Face's Llama names
    aux.safetensors    what the auxiliary flow adds (model.flows.is_aux), where it does; in folders
                       that transformers wrote it is in model.safetensors too
    tokenizer.json     of the `tokenizers` library; optional
    metrics.json       val_loss (of r), val_loss_p, val_loss_q in nats per token; optional
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualflow import config as configuration
from dualflow.checkpoint.atomic import atomic_folder, write_atomic
from dualflow.checkpoint.casting import cast
from dualflow.checkpoint.locate import (
    FORMAT_VERSION,
    MODEL_TYPE,
    find_model_folder,
    is_model_folder,
    missing_weights,
    read_json,
    read_model_config,
)
from dualflow.checkpoint.strict import (
    AUX_FILE,
    PRIMARY_FILE,
    check_counts,
    check_strict,
    expected_tensors,
    stored_tensors,
)
from dualflow.checkpoint.tensors import FLOATS, TensorEntry, load_tensors, read_header, save_tensors
from dualflow.data.tokenizers import Tokenizer, load_tokenizer
from dualflow.model import CausalLM, build_model
from dualflow.model.flows import is_aux
from dualflow.model.moe import keeps_format
from dualflow.model.quantise import (
    QUANTISED_TENSORS,
    QuantisedMatrix,
    quantised_matrices,
    with_quantised_modules,
)
from dualflow.spec import ModelConfig, QuantisedFormat, QuantisedWeights


def save_model(
    model: nn.Module,
    folder: str | Path,
    *,
    tokenizer_json: str | Path | None = None,
    metrics: Mapping[str, Any] | None = None,
    primary_config: Mapping[str, Any] | None = None,
) -> None:
    """Write ``model`` to ``folder`` atomically, replacing an earlier model there.

    tokenizer_json: the text of a tokenizer.json, or the ``Path`` of one.
    metrics:        flat numbers, by convention ``val_loss``, ``val_loss_p``, ``val_loss_q``;
                    not-a-number becomes null.
    primary_config: the config.json of the family that the primary was imported from.

    A model wrapped by torch.compile or DistributedDataParallel is saved under the same names as a
    bare one. Raises ``ValueError`` where ``folder`` is a file or holds something that is not a
    model.
    """
    with atomic_folder(folder, replaceable=is_model_folder) as temporary:
        write_model(
            model, temporary, tokenizer_json=tokenizer_json, metrics=metrics,
            primary_config=primary_config,
        )  # fmt: skip


def write_model(
    model: nn.Module,
    folder: Path,
    *,
    tokenizer_json: str | Path | None = None,
    metrics: Mapping[str, Any] | None = None,
    primary_config: Mapping[str, Any] | None = None,
) -> None:
    """Write a model's files into an existing ``folder``, such as one of ``atomic_folder``'s."""
    bare = _unwrap(model)
    tensors = stored_tensors(bare)
    save_tensors(
        folder / PRIMARY_FILE, {name: t for name, t in tensors.items() if not is_aux(name)}
    )
    if aux := {name: t for name, t in tensors.items() if is_aux(name)}:
        save_tensors(folder / AUX_FILE, aux)
    if tokenizer_json is not None:
        _write_text(folder / "tokenizer.json", _tokenizer_text(tokenizer_json))
    if metrics is not None:
        _write_json(folder / "metrics.json", _finite(metrics))
    table: dict[str, Any] = {"model_type": MODEL_TYPE, "format_version": FORMAT_VERSION}
    if bare.quantised is not None:
        table["weights"] = configuration.to_dict(QuantisedWeights(format=bare.quantised))
    table["config"] = configuration.to_dict(bare.config)
    if primary_config is not None:
        table["primary_config"] = dict(primary_config)
    _write_json(folder / "config.json", table)


def load_model(
    folder: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    weights: QuantisedFormat | None = None,
) -> CausalLM:
    """The model in ``folder``, in eval mode.

    folder:   a model folder, or a run folder: its final model, else its newest checkpoint.
    dtype:    the floating-point format to load as; None keeps each tensor as it is stored. The
              codes and scales of quantised matrices are always kept: of such a model it says how
              everything else is held, activations included.
    weights:  quantise the matrices while they are read (``model.quantise``); None leaves them as
              they are stored.

    Raises ``ValueError`` where anything is missing, unexpected, of another shape or number format,
    damaged, of another kind of model, or too large for the ``dtype`` asked for; every message names
    the file and the tensors.
    """
    place = find_model_folder(folder)
    config, stored_as = read_config(place), read_quantised(place)
    kind = weights or stored_as
    if stored_as not in (None, kind):
        raise ValueError(
            f"{place} holds {stored_as} weights, which cannot be made {kind}; "
            "load the model they were made from"
        )
    headers = _read_headers(place)
    stored = {name: entry for header in headers.values() for name, entry in header.items()}
    check_counts(place, config, len(stored))
    check_strict(place, expected_tensors(place, config, stored_as), headers)
    model = _empty_model(config, kind, device, dtype or _main_dtype(stored))
    tensors, matrices = stored_tensors(model), quantised_matrices(model)
    with torch.no_grad():
        for file in headers:
            for name, tensor in load_tensors(place / file).items():
                module, _, leaf = name.rpartition(".")
                where = f"{place / file}: {name}"
                if module not in matrices or leaf not in QUANTISED_TENSORS:
                    _assign(tensors[name], tensor, None if keeps_format(name) else dtype, where)
                elif stored_as is None:
                    _quantise(matrices[module], tensor, where)
                else:
                    _assign_quantised(tensors[name], tensor, where)
    return model.eval()


def read_quantised(folder: str | Path) -> QuantisedFormat | None:
    """The format of the matrices of a model or run folder; None where they are floats. Raises
    ``ValueError`` as ``load_model`` does.
    """
    place = find_model_folder(folder)
    table = read_model_config(place)
    if "weights" not in table:
        return None
    try:
        return configuration.from_dict(QuantisedWeights, table["weights"], "weights").format
    except ValueError as error:
        raise ValueError(f"{place / 'config.json'}: {error}") from error


def read_config(folder: str | Path) -> ModelConfig:
    """The configuration of a model or run folder. Raises ``ValueError`` as ``load_model`` does."""
    place = find_model_folder(folder)
    table = read_model_config(place)
    try:
        return configuration.from_dict(ModelConfig, table.get("config", {}))
    except ValueError as error:
        raise ValueError(f"{place / 'config.json'}: config.{error}") from error


def read_primary_config(folder: str | Path) -> dict[str, Any] | None:
    """The config.json of the family that a model folder's primary was imported from; None: it was
    not imported. Raises ``ValueError`` as ``load_model`` does.
    """
    place = find_model_folder(folder)
    table = read_model_config(place).get("primary_config")
    if table is not None and not isinstance(table, dict):
        raise ValueError(
            f"{place / 'config.json'}: primary_config is {table!r}; expected an object"
        )
    return table


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


def _empty_model(
    config: ModelConfig,
    kind: QuantisedFormat | None,
    device: str | torch.device,
    dtype: torch.dtype,
) -> CausalLM:
    """A model that is filled by the caller; the float matrices of a quantised one never exist."""
    if kind is None:
        return build_model(config, None, device, dtype)
    model = build_model(config, None, "meta", dtype)
    return with_quantised_modules(model, kind).to_empty(device=device)


def _main_dtype(stored: Mapping[str, TensorEntry]) -> torch.dtype:
    """The format of most weights: what the model is built in before each tensor gets its own. Of
    quantised models: of most of what is not quantised.
    """
    sizes: dict[str, int] = {}
    for name, entry in stored.items():
        if entry.dtype in FLOATS and not name.endswith(QUANTISED_TENSORS[1:]):
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + math.prod(entry.shape)
    return FLOATS[max(sizes, key=lambda name: sizes[name])]


def _quantise(matrix: QuantisedMatrix, tensor: Tensor, name: str) -> None:
    try:
        matrix.assign(tensor)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _assign_quantised(buffer: Tensor, tensor: Tensor, name: str) -> None:
    """Copy codes, or scales that must be numbers."""
    if tensor.is_floating_point() and not tensor.isfinite().all():
        wrong = int((~tensor.isfinite()).sum())
        raise ValueError(f"{name}: {wrong:,} of {tensor.numel():,} values are not finite")
    buffer.copy_(tensor)


def _assign(parameter: Tensor, tensor: Tensor, dtype: torch.dtype | None, name: str) -> None:
    """Copy ``tensor`` into ``parameter`` as ``dtype`` (None: as stored); overflow is an error."""
    converted = cast(tensor, dtype, name)
    if parameter.dtype == converted.dtype:
        parameter.copy_(converted)
    else:
        parameter.data = converted.to(parameter.device)


def _unwrap(model: nn.Module) -> CausalLM:
    while not isinstance(model, CausalLM):
        inner = getattr(model, "_orig_mod", getattr(model, "module", None))
        if not isinstance(inner, nn.Module):
            raise TypeError(
                f"save_model got a {type(model).__name__}; expected a dualflow CausalLM"
            )
        model = inner
    return model


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
