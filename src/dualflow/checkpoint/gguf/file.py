"""GGUF files as containers: what they say they hold, checked against their size before any of it
is believed.

The format is llama.cpp's (versions 2 and 3, little-endian): a header, metadata, a table of tensors,
then their data. Everything is read in Python integers, so no length can wrap; lengths that lie,
tensors that overlap or point outside the file and truncated files end as one ``ValueError`` that
names the file. The ``gguf`` package (extra ``gguf``) turns quantised blocks into numbers.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualflow.extras import require_extra

Metadata = dict[str, Any]

BLOCKS: dict[str, tuple[int, int, int]] = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2), "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
}  # fmt: skip
"""The number formats we read: their number in the file, values per block, bytes per block."""

_NAMES = {number: name for name, (number, _, _) in BLOCKS.items()}
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_LONGEST_NAME = 1 << 16

_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_FLOAT32, _STRING, _ARRAY = 6, 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: its format ("Q4_1"), its shape with rows first, and where its bytes lie."""

    path: Path
    name: str
    format: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class GGUFFile:
    """What a GGUF file, or all parts of a split one, hold, apart from the data itself."""

    path: Path
    metadata: Metadata
    tensors: dict[str, GGUFTensor]

    def read(self, name: str) -> NDArray[np.float32]:
        """The values of one tensor, dequantised, in memory of their own.

        Raises ``ValueError`` where the file has changed or cannot be read, ``MissingExtraError``
        where the ``gguf`` package is not there.
        """
        gguf = require_extra("gguf", "gguf", "reading GGUF files")
        tensor, data = self.tensors[name], self.raw(name)
        _, values, size = BLOCKS[tensor.format]
        rows = tensor.shape[:-1]
        blocks = np.frombuffer(data, np.uint8).reshape(*rows, tensor.shape[-1] // values * size)
        numbers = gguf.dequantize(blocks, gguf.GGMLQuantizationType[tensor.format])
        return np.array(numbers, np.float32).reshape(tensor.shape)

    def raw(self, name: str) -> bytes:
        """The bytes of one tensor as they are stored. Raises ``ValueError`` as ``read`` does."""
        tensor = self.tensors[name]
        try:
            with tensor.path.open("rb") as file:
                file.seek(tensor.begin)
                data = file.read(tensor.end - tensor.begin)
        except OSError as error:
            raise ValueError(f"{tensor.path} cannot be read: {error.strerror}") from error
        if len(data) != tensor.end - tensor.begin:
            raise ValueError(f"{tensor.path} was cut short while it was read, in {name!r}")
        return data


def read_gguf(path: str | Path) -> GGUFFile:
    """The metadata and the table of tensors of a GGUF file; no tensor data is read.

    Raises ``ValueError``, one line naming the file: it is missing, cut short, damaged or crafted,
    big-endian, of another version, or has a tensor of a format we do not read.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise ValueError(f"{path} is not a GGUF file: it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(path, _Cursor(data))
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def _read(path: Path, cursor: "_Cursor") -> GGUFFile:
    try:
        _check_version(cursor)
        num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
        cursor.require(
            num_keys * 13 + num_tensors * 24, f"{num_keys:,} keys, {num_tensors:,} tensors"
        )
        metadata: Metadata = {}
        for _ in range(num_keys):
            key = cursor.name("a key")
            if key in metadata:
                raise ValueError(f"the key {key!r} occurs twice")
            metadata[key] = cursor.value(cursor.number("I"), key)
        table = [_entry(cursor) for _ in range(num_tensors)]
        return GGUFFile(path, metadata, _place(path, table, metadata, cursor))
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a usable GGUF file: {str(error)[:300]}") from error


def _check_version(cursor: "_Cursor") -> None:
    magic = cursor.take(4, "the first four bytes")
    if magic != b"GGUF":
        raise ValueError(f"it begins with {magic!r}; expected b'GGUF'")
    version = cursor.number("I")
    if version & 0xFFFF == 0 and version:
        raise ValueError("it is big-endian; expected a little-endian file")
    if version not in _VERSIONS:
        known = " or ".join(map(str, _VERSIONS))
        raise ValueError(f"it is GGUF version {version}; expected version {known}")


def _entry(cursor: "_Cursor") -> tuple[str, int, tuple[int, ...], int]:
    """Name, number of the format, shape with rows first, offset in the data."""
    name = cursor.name("the name of a tensor")
    dimensions = cursor.number("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise ValueError(
            f"tensor {name!r} has {dimensions:,} dimensions; expected 1 to {_MAX_DIMENSIONS}"
        )
    shape = tuple(cursor.number("Q") for _ in range(dimensions))
    if 0 in shape:
        raise ValueError(f"tensor {name!r} has a dimension of size 0")
    return name, cursor.number("I"), shape[::-1], cursor.number("Q")


def _place(
    path: Path,
    table: list[tuple[str, int, tuple[int, ...], int]],
    metadata: Metadata,
    cursor: "_Cursor",
) -> dict[str, GGUFTensor]:
    """The tensors with their byte ranges, which lie in the file and do not overlap."""
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & alignment - 1:
        raise ValueError(f"general.alignment is {alignment!r}; expected a power of two")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, number, shape, offset in table:
        if name in tensors:
            raise ValueError(f"the tensor {name!r} occurs twice")
        if number not in _NAMES:
            raise ValueError(
                f"tensor {name!r} is stored in {_format_name(number)}; supported: "
                f"{', '.join(BLOCKS)}"
            )
        _, values, size = BLOCKS[_NAMES[number]]
        if shape[-1] % values:
            raise ValueError(
                f"tensor {name!r} has rows of {shape[-1]:,} values; {_NAMES[number]} is made of "
                f"blocks of {values}"
            )
        if offset % alignment:
            raise ValueError(f"tensor {name!r} begins at {offset:,}, not aligned to {alignment}")
        begin = start + offset
        end = begin + math.prod(shape) // values * size
        if end > cursor.size:
            raise ValueError(
                f"tensor {name!r} of shape {list(shape)} ends at byte {end:,}, the file has "
                f"{cursor.size:,}; it may be cut short"
            )
        tensors[name] = GGUFTensor(path, name, _NAMES[number], shape, begin, end)
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.begin)
    for first, second in pairwise(ordered):
        if second.begin < first.end:
            raise ValueError(f"the tensors {first.name!r} and {second.name!r} overlap")
    return tensors


def _format_name(number: int) -> str:
    try:
        gguf = require_extra("gguf", "gguf", "reading GGUF files")
        return str(gguf.GGMLQuantizationType(number).name)
    except (ImportError, ValueError):
        return f"the unknown format {number}"


class _Cursor:
    """Reads a file front to back; whatever would pass its end is a ``ValueError``."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.size = len(data)
        self.position = 0

    def require(self, size: int, what: str) -> None:
        if size > self.size - self.position:
            raise ValueError(
                f"{what} at byte {self.position:,} would take {size:,} bytes, "
                f"{self.size - self.position:,} are left; it is cut short or damaged"
            )

    def take(self, size: int, what: str) -> bytes:
        self.require(size, what)
        self.position += size
        return self._data[self.position - size : self.position]

    def number(self, code: str) -> Any:
        data = self.take(struct.calcsize(f"<{code}"), "a number")
        return struct.unpack(f"<{code}", data)[0]

    def text(self, what: str) -> str:
        return self.take(self.number("Q"), f"the text of {what}").decode("utf-8")

    def name(self, what: str) -> str:
        text = self.text(what)
        if not text.isprintable() or len(text) > _LONGEST_NAME:
            raise ValueError(f"{what} is {text[:60]!r}; expected a printable name")
        return text

    def value(self, kind: int, key: str) -> Any:
        """A metadata value: number, truth value, text, or a list of one of these."""
        if kind == _STRING:
            return self.text(repr(key))
        if kind in _SCALARS:
            return (
                _shortest(self.number(_SCALARS[kind]))
                if kind == _FLOAT32
                else self.number(_SCALARS[kind])
            )
        if kind != _ARRAY:
            raise ValueError(f"the key {key!r} is of unknown kind {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner == _STRING:
            self.require(8 * count, f"the list {key!r}")
            return [self.text(repr(key)) for _ in range(count)]
        if inner not in _SCALARS:
            raise ValueError(f"the key {key!r} is a list of kind {inner}, which is not supported")
        code = _SCALARS[inner]
        data = self.take(count * struct.calcsize(f"<{code}"), f"the list {key!r}")
        numbers = list(struct.unpack(f"<{count}{code}", data))
        return [_shortest(number) for number in numbers] if inner == _FLOAT32 else numbers


def _shortest(number: float) -> float:
    """A 32-bit number as people wrote it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(number)))
