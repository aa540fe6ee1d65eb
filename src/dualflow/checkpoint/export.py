"""The primary of a model as a stock Hugging Face checkpoint, which transformers and what reads its
folders load without us: the auxiliary flows stay behind.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dualflow.checkpoint.atomic import atomic_folder, write_atomic
from dualflow.checkpoint.casting import cast
from dualflow.checkpoint.companions import (
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    write_companions,
)
from dualflow.checkpoint.families import (
    Family,
    Location,
    differences,
    express,
    find_family,
    rows_axis,
)
from dualflow.checkpoint.huggingface_folder import INDEX, SINGLE
from dualflow.checkpoint.strict import expected_tensors, stored_tensors
from dualflow.checkpoint.tensors import save_tensors
from dualflow.data.tokenizers import Tokenizer
from dualflow.model import CausalLM
from dualflow.spec import ModelConfig, standard_twin

ExportFormat = Literal["auto", "float32", "bfloat16", "float16"]

Progress = Callable[[int, int], None]
"""Called with the number of files of weights written and their total."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FILE_BYTES = 5 * 10**9
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def export_huggingface(
    model: CausalLM,
    folder: str | Path,
    *,
    primary_config: Mapping[str, Any] | None = None,
    companions: Mapping[str, str] | None = None,
    dtype: ExportFormat = "auto",
    progress: Progress | None = None,
    file_bytes: int = _FILE_BYTES,
) -> None:
    """Write the primary of ``model`` to the new ``folder`` atomically, as its family's checkpoint.

    primary_config:  the config.json it was imported with, written as it was but for the number
                     format; None: one is made, of the first family that has exactly the model's
                     switches.
    companions:      texts of tokenizer and chat template by file name.
    dtype:           the floating-point format of every tensor; ``auto`` keeps each as it is.
    file_bytes:      weights beyond this many bytes are spread over several files with an index.

    Raises ``ValueError`` in one line: quantised matrices, a primary that was not trained to be
    read, switches that no family has, a ``primary_config`` that says something else than the
    model's configuration, values too large for ``dtype``, a ``folder`` that holds something.
    """
    if dtype not in get_args(ExportFormat):
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(get_args(ExportFormat))}")
    _require_plain(model)
    family, table = _config(model.config, primary_config, companions or {})
    stored = _places(model, family)
    shards = _shards(stored, _DTYPES.get(dtype), file_bytes)
    with atomic_folder(folder, replaceable=lambda _: False) as temporary:
        _write_weights(temporary, stored, shards, _DTYPES.get(dtype), progress)
        table |= _dtype_keys(table, _main_dtype(stored, _DTYPES.get(dtype)))
        _write_json(temporary / "config.json", table)
        write_companions(temporary, _with_class(companions or {}))


def _require_plain(model: CausalLM) -> None:
    if model.quantised is not None:
        raise ValueError(
            f"the model's matrices are {model.quantised}, which Hugging Face folders do not hold; "
            "export the float model that they were made from"
        )
    if not model.has_primary_readout:
        raise ValueError(
            f"this {model.config.variant} model was trained to be read from its auxiliary rows "
            "only, so its primary alone is no language model that could be exported"
        )


def _config(
    config: ModelConfig, given: Mapping[str, Any] | None, companions: Mapping[str, str]
) -> tuple[Family, dict[str, Any]]:
    """The family and its config.json, without the number format."""
    if given is None:
        family, table = express(config)
        return family, {**table, **_special_ids(companions)}
    try:
        family = find_family(given)
        wrong = differences(config, family.read(given), "config.json")
    except ValueError as error:
        raise ValueError(f"the config.json that the model came with: {error}") from error
    if wrong:
        raise ValueError(
            "the model is not the one that the config.json it came with describes; one of the two "
            f"was changed: {'; '.join(wrong)}"
        )
    # A model saved without its head is written with it.
    return family, {**given, "architectures": [family.architectures[0]]}


def _special_ids(companions: Mapping[str, str]) -> dict[str, Any]:
    """Ids for a config.json that is made here. None is left to the family's defaults: those are
    ids of another vocabulary.
    """
    ids: dict[str, Any] = dict.fromkeys(_SPECIAL_IDS)
    if GENERATION_CONFIG in companions:
        try:
            named = json.loads(companions[GENERATION_CONFIG])
            return {key: named.get(key) for key in _SPECIAL_IDS}
        except (ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{GENERATION_CONFIG} cannot be read: {error}") from error
    if TOKENIZER in companions:
        ids["eos_token_id"] = Tokenizer.from_json(companions[TOKENIZER]).eos_id
    return ids


def _with_class(companions: Mapping[str, str]) -> dict[str, str]:
    """The companions, and where nothing says what reads the tokenizer.json, that it is taken as it
    is: transformers would make its family's own kind of it.
    """
    texts = dict(companions)
    if TOKENIZER in texts and TOKENIZER_CONFIG not in texts:
        eos = Tokenizer.from_json(texts[TOKENIZER]).eos_token
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
        texts[TOKENIZER_CONFIG] = json.dumps(named, indent=2, ensure_ascii=False) + "\n"
    return texts


Places = dict[str, list[tuple[Location, Tensor]]]
"""Tensors to write by name: what of ours lies in each, in order."""


def _places(model: CausalLM, family: Family) -> Places:
    config, tensors, places = standard_twin(model.config), stored_tensors(model), {}
    for ours in expected_tensors(Path(), config, None):
        for location in family.names.locate(ours, config):
            tensor = tensors[ours].detach()
            part = tensor if location.expert is None else tensor[location.expert]
            places.setdefault(location.name, []).append((location, part))
    for parts in places.values():
        parts.sort(key=lambda part: part[0].index)
    return places


def _shards(stored: Places, dtype: torch.dtype | None, limit: int) -> list[list[str]]:
    """Names of the tensors of each file."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, parts in stored.items():
        size = sum(t.numel() * (dtype or t.dtype).itemsize for _, t in parts)
        if filled and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _write_weights(
    folder: Path,
    stored: Places,
    shards: list[list[str]],
    dtype: torch.dtype | None,
    progress: Progress | None,
) -> None:
    files: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards):
        if progress is not None:
            progress(number, len(shards))
        file = SINGLE
        if len(shards) > 1:
            file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = dict(_joined(names, stored, dtype))
        save_tensors(folder / file, tensors)
        files |= dict.fromkeys(names, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files})
    if progress is not None:
        progress(len(shards), len(shards))


def _joined(
    names: list[str], stored: Places, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor as the family stores it."""
    for name in names:
        parts = [cast(tensor, dtype, name) for _, tensor in stored[name]]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, rows_axis(parts[0].dim()))
        yield name, tensor.t() if stored[name][0][0].transposed else tensor


def _main_dtype(stored: Places, dtype: torch.dtype | None) -> torch.dtype:
    """The format of most weights, which config.json names."""
    if dtype is not None:
        return dtype
    sizes: dict[torch.dtype, int] = {}
    for parts in stored.values():
        for _, tensor in parts:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda kind: sizes[kind])


def _dtype_keys(table: Mapping[str, Any], dtype: torch.dtype) -> dict[str, str]:
    """The number format under the keys that name it already, else under the oldest of them."""
    keys = [key for key in ("dtype", "torch_dtype") if key in table] or ["torch_dtype"]
    return dict.fromkeys(keys, str(dtype).removeprefix("torch."))


def _write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
