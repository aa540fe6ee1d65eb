"""Safetensors files: written atomically, and checked by us before anything is allocated for them.

A file is judged by its header alone, in Python integers: lengths that lie, ranges that overlap or
point outside the file, products that would wrap and truncated files end as one ``ValueError`` that
names the file.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from dualflow.checkpoint.atomic import write_atomic

_MAX_HEADER_BYTES = 8 * 1024 * 1024
"""Some 80,000 tensors; a longer header is refused before it is read."""

_BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip

FLOATS: dict[str, torch.dtype] = {
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
"""The number formats a model's weights may be stored in, by their safetensors names."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a header: format ("BF16"), sizes, and where its bytes lie in the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def save_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write ``tensors``, of any device and layout, to a safetensors file in one atomic step."""
    independent: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        stored = tensor.detach().to("cpu").contiguous()
        # The format has no views: whatever shares its memory with something else is written out in
        # full.
        if stored.untyped_storage().nbytes() != stored.nbytes or stored.data_ptr() in seen:
            stored = stored.clone()
        seen.add(stored.data_ptr())
        independent[name] = stored
    notes = {"format": "pt", **(metadata or {})}

    def write(temporary: Path) -> None:
        # The library makes files that only their owner can read; these are files like any other.
        temporary.touch()
        mode = temporary.stat().st_mode
        try:
            safetensors.torch.save_file(independent, temporary, notes)
        except safetensors.SafetensorError as error:  # a full disk is one, which is an OSError
            raise OSError(f"{path} cannot be written: {error}") from error
        temporary.chmod(mode)

    write_atomic(Path(path), write)


def load_tensors(path: str | Path, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Read every tensor of a safetensors file into memory of its own.

    Raises ``ValueError`` naming the file where it is missing, damaged or crafted.
    """
    read_header(path)
    try:
        mapped = safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError, RuntimeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error
    # Copied off the memory map: a file that is replaced or cut later must not change (or crash)
    # what was loaded.
    return {name: tensor.to(device, copy=True) for name, tensor in mapped.items()}


def read_header(path: str | Path) -> dict[str, TensorEntry]:
    """The tensors a safetensors file says it holds, checked against its size; no data is read.

    Raises ``ValueError`` naming the file and, where there is one, the offending tensor.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            limit = min(size - 8, _MAX_HEADER_BYTES)
            if size < 8 or not 2 <= length <= limit:
                raise ValueError(
                    f"{path} is not a usable safetensors file: its {size:,} bytes announce "
                    f"a header of {length:,} bytes (possible here: 2 to {max(limit, 2):,}); "
                    "it is cut short, damaged or another format"
                )
            text = file.read(length)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        if not isinstance(entries, dict):
            raise ValueError("not a table of tensors")
        entries.pop("__metadata__", None)
        header = {name: _entry(name, value) for name, value in entries.items()}
        _check_cover(header, size - 8 - length)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:300]
        raise ValueError(
            f"{path} has a damaged safetensors header (bytes 8 to {8 + length:,}): {reason}"
        ) from error
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _entry(name: str, value: Any) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"tensor {name!r}: unknown dtype {dtype!r}")
    if not _naturals(shape) or len(shape) > 16:
        raise ValueError(f"tensor {name!r}: the shape is not a list of at most 16 sizes")
    if not _naturals(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r}: data_offsets is not a pair of byte positions")
    begin, end = offsets
    needed = -(-math.prod(shape) * _BITS[dtype] // 8)
    if end - begin != needed:
        raise ValueError(
            f"tensor {name!r}: shape {shape} of {dtype} takes {needed:,} bytes, "
            f"data_offsets span {end - begin:,}"
        )
    return TensorEntry(dtype, tuple(shape), begin, end)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_cover(header: Mapping[str, TensorEntry], available: int) -> None:
    """The byte ranges must tile the data exactly: no overlap, no gap, nothing outside the file."""
    position = 0
    for name, entry in sorted(header.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            kind = "overlaps" if entry.begin < position else "leaves a gap after"
            raise ValueError(
                f"tensor {name!r} at byte {entry.begin:,} {kind} what ends at byte {position:,}"
            )
        position = entry.end
    if position != available:
        raise ValueError(
            f"the tensors take {position:,} bytes of data, the file holds {available:,}; "
            "it may be cut short"
        )
