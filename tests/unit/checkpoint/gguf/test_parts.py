"""Split GGUF files: all parts are one, and a part alone is not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf: Any = pytest.importorskip("gguf")

from dualflow.checkpoint.gguf.parts import read_gguf_parts  # noqa: E402
from dualflow.testing.gguf import write_gguf  # noqa: E402

VALUES = {name: np.full(3, place, np.float32) for place, name in enumerate("abc")}


def split(folder: Path, **changes: int) -> list[Path]:
    """Three parts of a tensor each."""
    paths = []
    for number, (name, values) in enumerate(VALUES.items()):
        keys = {"split.no": number, "split.count": 3, "split.tensors.count": 3, **changes}
        metadata = keys | ({"a.key": 1} if number == 0 else {})
        path = folder / f"m-{number + 1:05}-of-00003.gguf"
        paths.append(write_gguf(path, metadata, {name: values}))
    return paths


def refused(path: Path, *parts: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_gguf_parts(path)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_the_tensors_of_all_parts_are_read(tmp_path: Path):
    file = read_gguf_parts(split(tmp_path)[0])
    assert file.metadata == {"general.architecture": "llama", "a.key": 1}
    for name, values in VALUES.items():
        assert np.array_equal(file.read(name), values)


def test_a_later_part_names_the_first(tmp_path: Path):
    refused(split(tmp_path)[1], "not the first part", "name m-00001-of-00003.gguf")


def test_a_missing_part_is_named(tmp_path: Path):
    paths = split(tmp_path)
    paths[2].unlink()
    refused(paths[0], "m-00003-of-00003.gguf is missing")


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path):
    paths = split(tmp_path)
    paths[1].write_bytes(paths[2].read_bytes())
    refused(paths[0], "m-00002-of-00003.gguf", "split.no and split.count are 2 and 3")
    write_gguf(paths[1], {"split.no": 1, "split.count": 3}, {"a": VALUES["a"]})
    refused(paths[0], "the tensor 'a' is in an earlier part too")


def test_a_total_that_is_not_reached_is_refused(tmp_path: Path):
    refused(
        split(tmp_path, **{"split.tensors.count": 4})[0],
        "split.tensors.count is 4, the parts hold 3",
    )


def test_a_renamed_part_cannot_find_the_others(tmp_path: Path):
    path = split(tmp_path)[0].rename(tmp_path / "model.gguf")
    refused(path, "one of 3 parts", "-00001-of-00003.gguf")
