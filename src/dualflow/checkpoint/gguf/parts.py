"""GGUF files that llama.cpp's gguf-split cut into parts: ``name-00001-of-00003.gguf`` and so on.

The first part holds the metadata, every part its own table of tensors.
"""

import dataclasses
import re
from pathlib import Path

from dualflow.checkpoint.gguf.file import GGUFFile, GGUFTensor, read_gguf

_LARGEST_SPLIT = 10_000
_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def read_gguf_parts(path: str | Path) -> GGUFFile:
    """What a GGUF file holds; of the first part of a split one, what all parts hold together.

    Raises ``ValueError`` as ``read_gguf`` does, and where ``path`` is another part, a part is
    missing, or the parts do not belong together.
    """
    first = read_gguf(path)
    count = first.metadata.get("split.count", 1)
    if count == 1:
        return first
    if type(count) is not int or not 1 < count <= _LARGEST_SPLIT:
        raise ValueError(f"{path}: split.count is {count!r}; expected 1 to {_LARGEST_SPLIT:,}")
    named = _NAME.fullmatch(first.path.name)
    if named is None or int(named[3]) != count:
        raise ValueError(
            f"{path} says it is one of {count} parts; expected a name that ends in "
            f"-00001-of-{count:05}.gguf, by which the others are found"
        )
    names = [f"{named[1]}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    if first.metadata.get("split.no") != 0 or int(named[2]) != 1:
        raise ValueError(f"{path} is not the first part of a split file; name {names[0]}")
    tensors = dict(first.tensors)
    for number, name in enumerate(names[1:], 1):
        tensors |= _tensors_of(first, first.path.parent / name, number, count, tensors)
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ValueError(f"{path}: split.tensors.count is {total}, the parts hold {len(tensors)}")
    metadata = {k: v for k, v in first.metadata.items() if not k.startswith("split.")}
    return dataclasses.replace(first, metadata=metadata, tensors=tensors)


def _tensors_of(
    first: GGUFFile, path: Path, number: int, count: int, before: dict[str, GGUFTensor]
) -> dict[str, GGUFTensor]:
    part = read_gguf(path)
    found = part.metadata.get("split.no"), part.metadata.get("split.count")
    if found != (number, count):
        raise ValueError(
            f"{path}: split.no and split.count are {found[0]!r} and {found[1]!r}; expected "
            f"{number} and {count}, as of the parts of {first.path}"
        )
    if twice := sorted(before.keys() & part.tensors.keys()):
        raise ValueError(f"{path}: the tensor {twice[0]!r} is in an earlier part too")
    return part.tensors
