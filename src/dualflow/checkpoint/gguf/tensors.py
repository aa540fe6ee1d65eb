"""Which tensors of a GGUF file are which of ours, and how their rows lie there."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dualflow.checkpoint.gguf.families import Family
from dualflow.model import build_model
from dualflow.spec import ModelConfig


class Part(NamedTuple):
    """One of our tensors."""

    name: str
    shape: tuple[int, ...]


def tensor_plan(config: ModelConfig, family: Family) -> dict[str, tuple[Part, ...]]:
    """Every tensor of a file for ``config``, a standard model, and ours that it holds, row under
    row. A head that is the embedding is not among them.

    Raises ``ValueError`` where the sizes are those of no model that could be.
    """
    found: dict[str, dict[int, Part]] = {}
    try:
        model = build_model(config, device="meta")
    except (RuntimeError, OverflowError, MemoryError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"the sizes describe a model that cannot be built: {reason}") from error
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        theirs, place = family.name_of(module)
        found.setdefault(f"{theirs}.{kind}", {})[place] = Part(name, tuple(parameter.shape))
    return {name: tuple(parts[i] for i in sorted(parts)) for name, parts in found.items()}


def is_gain(name: str) -> bool:
    """Whether a tensor of ours is the gain of a norm."""
    return name.endswith("norm.weight")


def rotated_heads(name: str, family: Family, config: ModelConfig) -> int:
    """How many heads the rows of ``name`` are that lie interleaved in the file; 0: they lie as ours
    do. Biases are turned with their matrices.
    """
    if not family.interleaved:
        return 0
    if ".q_proj." in name:
        return config.num_heads
    return config.kv_heads if ".k_proj." in name else 0


def unpermute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a query or key matrix, or its bias, in Hugging Face's order.

    llama.cpp turns neighbouring pairs where Hugging Face turns a head's first half with its second;
    its files of the Llama family have each head's rows interleaved to make up for it. ``heads``
    counts the heads of this matrix: query heads for queries, kv heads for keys.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def permute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """What ``unpermute`` undoes."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
