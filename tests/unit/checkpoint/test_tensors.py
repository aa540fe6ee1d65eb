"""Crafted and damaged safetensors files: one error that names file and reason, at once, without
memory.
"""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualflow.checkpoint import load_tensors, read_header, save_tensors


def crafted(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


CASES: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "0 bytes"),
    "seven bytes": (b"\x01" * 7, "7 bytes"),
    "no header": (crafted(b""), "header of 0 bytes"),
    "header length 2^60": (crafted({}, length=2**60), "header of 1,152,921,504,606,846,976 bytes"),
    "header length 2^64 - 1": (crafted({}, length=2**64 - 1), "announce a header"),
    "header beyond the file": (crafted({}, length=3), "announce a header"),
    "pickle": (b"\x80\x04\x95" + bytes(100), "announce a header"),
    "big-endian length": (len(b"{}").to_bytes(8, "big") + b"{}", "announce a header"),
    "not JSON": (crafted(b"{]"), "damaged"),
    "not UTF-8": (crafted(b'{"\xff":1}'), "damaged"),
    "a list": (crafted([]), "not a table"),
    "nested deep": (crafted(b'{"a":' + b"[" * 100_000), "nested too deeply"),
    "a huge number": (crafted(b'{"a":' + b"9" * 100_000 + b"}"), "damaged"),
    "name twice": (crafted(b'{"a":1,"a":1}'), "twice"),
    "no fields": (crafted({"a": {}}), "'a': expected dtype"),
    "unknown dtype": (crafted({"a": entry("F99")}, bytes(4)), "unknown dtype 'F99'"),
    "negative size": (crafted({"a": entry(shape=[-1])}, bytes(4)), "'a': the shape"),
    "fractional size": (crafted({"a": entry(shape=[1.0])}, bytes(4)), "'a': the shape"),
    "sizes whose product wraps 64 bits": (
        crafted({"a": entry(shape=[2**32, 2**32, 4])}, bytes(4)), "takes"
    ),
    "one huge size": (crafted({"a": entry(shape=[2**70])}, bytes(4)), "takes"),
    "a thousand axes": (crafted({"a": entry(shape=[1] * 1000)}, bytes(4)), "'a': the shape"),
    "past the end": (crafted({"a": entry(offsets=[0, 4])}, bytes(3)), "cut short"),
    "far past the end": (crafted({"a": entry("U8", [2**50], [0, 2**50])}), "cut short"),
    "backwards": (crafted({"a": entry(offsets=[4, 0])}, bytes(4)), "'a': shape"),
    "negative offset": (crafted({"a": entry(offsets=[-4, 0])}, bytes(4)), "'a': data_offsets"),
    "overlap": (
        crafted({"a": entry(), "b": entry(offsets=[2, 6])}, bytes(6)),
        "'b' at byte 2 overlaps",
    ),
    "same bytes twice": (crafted({"a": entry(), "b": entry()}, bytes(4)), "overlaps"),
    "gap": (
        crafted({"a": entry(), "b": entry(offsets=[8, 12])}, bytes(12)),
        "'b' at byte 8 leaves a gap",
    ),
    "bytes to spare": (crafted({"a": entry()}, bytes(5)), "the file holds 5"),
}  # fmt: skip


@pytest.mark.timeout(5)
@pytest.mark.parametrize("name", CASES)
def test_crafted_files_are_refused_at_once(tmp_path, name):
    content, reason = CASES[name]
    path = tmp_path / "crafted.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError) as caught:
            load_tensors(path)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.safetensors is missing"):
        read_header(tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="cannot be read"):
        read_header(tmp_path)


def test_a_header_tells_names_shapes_and_formats(tmp_path):
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(())})
    header = read_header(path)
    assert {name: (e.dtype, e.shape) for name, e in header.items()} == {
        "a": ("BF16", (2, 3)),
        "b": ("F32", ()),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("damage") / "x.safetensors"
    save_tensors(path, {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4)})
    return path.with_name("damaged.safetensors"), path.read_bytes()


@given(st.data())
def test_whatever_is_damaged_either_loads_or_is_a_value_error(whole, data):
    path, content = whole
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(
        damaged[: data.draw(st.integers(0, len(damaged)))] if data.draw(st.booleans()) else damaged
    )
    try:
        load_tensors(path)
    except ValueError as error:
        assert str(path) in str(error)


def test_a_full_disk_names_the_file_and_keeps_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save_tensors(path, {"a": torch.ones(2)})

    def fail(*_: object) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="model.safetensors cannot be written: .*No space left"):
        save_tensors(path, {"a": torch.zeros(2)})
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    assert torch.equal(load_tensors(path)["a"], torch.ones(2))
