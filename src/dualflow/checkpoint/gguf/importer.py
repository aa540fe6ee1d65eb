"""GGUF files into models of ours, with their tokenizer and template.

Nothing is guessed: a key of the metadata or a tensor that we do not know is refused by name, and so
is a tensor that is missing or of another shape.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dualflow.checkpoint.gguf.config import read_gguf_config
from dualflow.checkpoint.gguf.families import Family, find_family
from dualflow.checkpoint.gguf.file import GGUFFile
from dualflow.checkpoint.gguf.parts import read_gguf_parts
from dualflow.checkpoint.gguf.rope import ROPE_FREQS
from dualflow.checkpoint.gguf.tensors import Part, is_gain, rotated_heads, tensor_plan, unpermute
from dualflow.checkpoint.gguf.tokenizer import import_tokenizer
from dualflow.checkpoint.imported import Imported
from dualflow.extras import require_extra
from dualflow.model import build_model
from dualflow.spec import ModelConfig

Progress = Callable[[int, int], None]
"""Called with the number of tensors read and their total."""


def import_gguf(
    path: str | Path, dtype: torch.dtype | None = None, progress: Progress | None = None
) -> Imported:
    """The model in a GGUF file, in eval mode, with its tokenizer; of a split file, name the first
    part.

    dtype: the floating-point format of every weight; None: bfloat16 where all matrices are stored
           in it, else float32, which holds whatever the supported formats do.

    Gemma's files hold 1 + gain for every norm. Where 1 can be taken off and put back without loss
    (as it can for every gain that was bfloat16 once), the model has its family's own gains and
    ``norm_offset``; otherwise those of the file, so that it computes what the file says.

    Raises ``ValueError`` in one line that names the file and what is wrong with it: another
    architecture or tokenizer, an unknown key, a missing, unexpected or misshapen tensor, damage;
    ``MissingExtraError`` where the ``gguf`` package is not there.
    """
    require_extra("gguf", "gguf", "reading GGUF files")
    file = read_gguf_parts(path)
    try:
        family = find_family(file.metadata)
        companions, real = import_tokenizer(file.metadata)
        config = read_gguf_config(file, family, real)
        plan = tensor_plan(config, family)
        _check_tensors(file, family, config, plan)
        if family.offset_norms and _offset_is_exact(file, plan):
            config = dataclasses.replace(config, norm_offset=True)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    model = build_model(config, None, dtype=dtype or _stored_dtype(file))
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for done, (name, parts) in enumerate(plan.items()):
            if progress is not None:
                progress(done, len(plan))
            rows = np.split(file.read(name), np.cumsum([part.shape[0] for part in parts])[:-1])
            for part, values in zip(parts, rows, strict=True):
                parameter = parameters[part.name]
                ours = _as_ours(values, part.name, family, config)
                parameter.copy_(_checked(ours, parameter.dtype, f"{path}: {name}"))
    if progress is not None:
        progress(len(plan), len(plan))
    return Imported(model.eval(), companions)


def _as_ours(
    values: NDArray[np.float32], name: str, family: Family, config: ModelConfig
) -> NDArray[np.float32]:
    if heads := rotated_heads(name, family, config):
        return unpermute(values, heads)
    return values - np.float32(1) if config.norm_offset and is_gain(name) else values


def _check_tensors(
    file: GGUFFile, family: Family, config: ModelConfig, plan: Mapping[str, tuple[Part, ...]]
) -> None:
    """The file has all tensors that ``config`` needs, and no other ones."""
    allowed = {ROPE_FREQS} if family.rope_freqs else set[str]()
    if config.tie_embeddings and family.output_copy != "never":
        allowed.add("output.weight")
    problems = []
    if missing := sorted(plan.keys() - file.tensors.keys()):
        problems.append(f"missing {_few(missing)}")
    if unexpected := sorted(file.tensors.keys() - plan.keys() - allowed):
        problems.append(f"not supported {_few(unexpected)}")
    shapes = []
    for name, parts in plan.items():
        expected = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        if name in file.tensors and file.tensors[name].shape != expected:
            found = list(file.tensors[name].shape)
            shapes.append(f"{name} {found}, expected {list(expected)}")
    if shapes:
        problems.append(f"other shape: {_few(shapes)}")
    if problems:
        raise ValueError(f"the tensors are not those of a {family.title}: {'; '.join(problems)}")


def _offset_is_exact(file: GGUFFile, plan: Mapping[str, tuple[Part, ...]]) -> bool:
    """Whether 1 can be taken off every gain, and put back, without loss."""
    one = np.float32(1)
    gains = (file.read(name) for name, parts in plan.items() if is_gain(parts[0].name))
    return all(bool((gain - one + one == gain).all()) for gain in gains)


def _few(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _stored_dtype(file: GGUFFile) -> torch.dtype:
    formats = {tensor.format for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return torch.bfloat16 if formats == {"BF16"} else torch.float32


def _checked(values: NDArray[np.float32], dtype: torch.dtype, name: str) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} holds values that are not finite; the file is damaged")
    converted = tensor.to(dtype)
    if not bool(converted.isfinite().all()):
        raise ValueError(f"{name} holds values that are too large for {dtype}")
    return converted
