"""The primary of a model alone as a GGUF file, for llama.cpp and what builds on it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualflow.checkpoint.atomic import write_atomic
from dualflow.checkpoint.gguf.config import write_gguf_config
from dualflow.checkpoint.gguf.families import Family, choose_family
from dualflow.checkpoint.gguf.file import BLOCKS
from dualflow.checkpoint.gguf.rope import ROPE_FREQS, llama3_divisors
from dualflow.checkpoint.gguf.tensors import Part, is_gain, permute, rotated_heads, tensor_plan
from dualflow.checkpoint.gguf.tokenizer_export import export_tokenizer
from dualflow.extras import require_extra
from dualflow.model import CausalLM
from dualflow.spec import ModelConfig, standard_twin

GGUFKind = Literal["F32", "BF16", "F16", "Q8_0"]

_FILE_TYPES: dict[GGUFKind, int] = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
_ALWAYS_FLOAT32 = ("position_embd.weight", ROPE_FREQS)

Progress = Callable[[int, int], None]
"""Called with the number of tensors written and their total."""


def export_gguf(
    model: CausalLM,
    path: str | Path,
    *,
    companions: Mapping[str, str],
    kind: GGUFKind = "F32",
    progress: Progress | None = None,
) -> None:
    """Write the primary of ``model``, with its tokenizer and chat template, to the GGUF file
    ``path`` in one atomic step.

    companions: the texts of a model folder's companion files by name; tokenizer.json is needed.
    kind:       the format of matrices; vectors and learned positions are always F32.

    Raises ``ValueError`` before anything is written: a switch that no architecture of llama.cpp's
    expresses, a tokenizer that it cannot have, quantised matrices, values that are not finite or
    too large for ``kind``; ``MissingExtraError`` where the ``gguf`` package is not there.
    """
    gguf = require_extra("gguf", "gguf", "writing GGUF files")
    if kind not in get_args(GGUFKind):
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join(get_args(GGUFKind))}")
    if model.quantised is not None:
        raise ValueError(
            f"the model has {model.quantised} matrices; export the model they were made from"
        )
    if not model.has_primary_readout:
        raise ValueError(
            f"this {model.config.variant} model has no trained p of its own (readout "
            f"{model.config.readout.kind!r}): there is no primary to write"
        )
    config = standard_twin(model.config)
    family = choose_family(config)
    metadata = {
        "general.type": "model",
        "general.file_type": _FILE_TYPES[kind],
        "general.quantization_version": 2,
        **write_gguf_config(config, family),
        **export_tokenizer(companions, config.vocab_size),
    }
    plan = tensor_plan(config, family)
    if config.tie_embeddings and family.output_copy == "required":
        plan["output.weight"] = plan["token_embd.weight"]
    formats = {name: _format(name, parts, kind) for name, parts in plan.items()}
    tensors = _Tensors(model, config, family, plan, formats)
    tensors.check()

    def write(temporary: Path) -> None:
        writer = gguf.GGUFWriter(temporary, family.architecture)
        try:
            for key, value in metadata.items():
                _add(writer, key, value)
            tensors.write(writer, progress)
        except OSError as error:  # numpy says neither the file nor that the disk is full
            reason = error.strerror or f"{error}; the disk may be full"
            raise OSError(f"{path} cannot be written: {reason}") from error
        finally:
            writer.close()

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(Path(path), write)


class _Tensors:
    """What goes into the file, made one tensor at a time."""

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        family: Family,
        plan: Mapping[str, tuple[Part, ...]],
        formats: Mapping[str, str],
    ) -> None:
        self._parameters: dict[str, Tensor] = dict(model.named_parameters())
        self._config, self._family = config, family
        self._plan, self._formats = plan, dict(formats)
        self._divisors: NDArray[np.float32] | None = None
        scaling = config.rope_scaling
        if scaling is not None and scaling.kind == "llama3":
            self._divisors = llama3_divisors(scaling, config.head_size, config.rope_theta)
            self._formats[ROPE_FREQS] = "F32"

    def check(self) -> None:
        """Raise ``ValueError`` for the first value that its format cannot hold."""
        for name in self._formats:
            values = self._values(name)
            if not np.isfinite(values).all():
                raise ValueError(f"{name} holds values that are not finite")
            largest = float(np.abs(values).max())
            if largest > _LARGEST.get(self._formats[name], np.inf):
                raise ValueError(
                    f"{name} holds {largest:.4g}, which is too large for {self._formats[name]}; "
                    "export it as F32 or BF16"
                )

    def write(self, writer: Any, progress: Progress | None) -> None:
        """The whole file; ``writer`` is the ``gguf`` package's and has the metadata."""
        gguf = require_extra("gguf", "gguf", "writing GGUF files")
        kinds = {n: gguf.GGMLQuantizationType[kind] for n, kind in self._formats.items()}
        for name, kind in kinds.items():
            shape = self._shape(name)
            _, values, size = BLOCKS[kind.name]
            stored = (*shape[:-1], shape[-1] // values * size)
            count = int(np.prod(stored, dtype=np.int64))
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), count, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, (name, kind) in enumerate(kinds.items()):
            if progress is not None:
                progress(done, len(kinds))
            stored = gguf.quantize(self._values(name), kind)
            writer.write_tensor_data(np.ascontiguousarray(stored).view(np.uint8))
        if progress is not None:
            progress(len(kinds), len(kinds))

    def _shape(self, name: str) -> tuple[int, ...]:
        if name == ROPE_FREQS:
            return (self._config.head_size // 2,)
        parts = self._plan[name]
        return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])

    def _values(self, name: str) -> NDArray[np.float32]:
        if name == ROPE_FREQS and self._divisors is not None:
            return self._divisors
        return np.concatenate([self._part(part.name) for part in self._plan[name]])

    def _part(self, name: str) -> NDArray[np.float32]:
        values = self._parameters[name].detach().to("cpu", torch.float32).numpy()
        if heads := rotated_heads(name, self._family, self._config):
            return permute(values, heads)
        return values + np.float32(1) if self._config.norm_offset and is_gain(name) else values


_LARGEST = {"F16": 65504.0, "Q8_0": 127 * 65504.0}
"""Beyond these a value, or the scale of its block, is infinite."""


def _format(name: str, parts: tuple[Part, ...], kind: GGUFKind) -> str:
    shape = parts[0].shape
    if len(shape) == 1 or name in _ALWAYS_FLOAT32:
        return "F32"
    if shape[-1] % BLOCKS[kind][1]:
        raise ValueError(
            f"{name} has rows of {shape[-1]} values; {kind} is made of blocks of "
            f"{BLOCKS[kind][1]}; export it as F32, BF16 or F16"
        )
    return kind


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
