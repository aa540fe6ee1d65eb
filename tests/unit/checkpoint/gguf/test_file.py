"""GGUF files as containers: every length is checked before it is believed."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf: Any = pytest.importorskip("gguf")

from dualflow.checkpoint.gguf.file import read_gguf  # noqa: E402
from dualflow.testing.gguf import write_gguf  # noqa: E402

METADATA: dict[str, Any] = {
    "a.flag": True, "a.count": 7, "a.number": 1e-5, "a.text": "é", "a.list": [1, 2, 3],
    "a.words": ["x", "", "yz"],
}  # fmt: skip


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def header(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
    return string(name) + sizes + struct.pack("<IQ", kind, offset)


def padded(data: bytes, payload: int) -> bytes:
    return data + bytes(-len(data) % 32 + payload)


def refused(tmp_path: Path, data: bytes, found: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError) as caught:
        read_gguf(path)
    assert found in str(caught.value), str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_metadata_of_every_kind_and_tensors_come_back(tmp_path):
    tensors = {"m": np.arange(6, dtype=np.float32).reshape(2, 3), "v": np.ones(5, np.float32)}
    read = read_gguf(write_gguf(tmp_path / "a.gguf", METADATA, tensors))
    assert read.metadata == {"general.architecture": "llama", **METADATA}
    assert read.tensors["m"].shape == (2, 3)
    for name, values in tensors.items():
        assert np.array_equal(read.read(name), values)


def test_the_file_may_be_replaced_once_it_is_read(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", {}, {"v": np.ones(5, np.float32)})
    values = read_gguf(path).read("v")
    path.write_bytes(b"")
    assert values.sum() == 5


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "it is empty"),
        (b"PK\x03\x04 zip", "it begins with b'PK"),
        (b"GGUF\x03", "cut short"),
        (header(version=1), "GGUF version 1; expected version 2 or 3"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
        (header(keys=2**60), "1,152,921,504,606,846,976 keys"),
        (header(tensors=2**63), "tensors at byte 24"),
        (header(keys=1) + struct.pack("<Q", 2**63) + bytes(40), "would take"),
        (header(keys=1) + string("k") + struct.pack("<IIQ", 9, 0, 2**62), "the list 'k'"),
        (header(keys=1) + string("k") + struct.pack("<IIQ", 9, 8, 2**61), "the list 'k'"),
        (header(keys=1) + string("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(9), "list of kind 9"),
        (header(keys=1) + string("k") + struct.pack("<I", 77) + bytes(9), "of unknown kind 77"),
        (header(keys=1) + string("\x1b[0m") + bytes(40), "expected a printable name"),
        (header(keys=1) + struct.pack("<Q", 2) + b"\xff\xfe" + bytes(9), "utf-8"),
        (header(keys=2) + 2 * (string("k") + struct.pack("<IB", 0, 1)) + bytes(4),
         "the key 'k' occurs twice"),
        (header(1) + tensor("t", (0, 2)) + bytes(64), "a dimension of size 0"),
        (header(1) + string("t") + struct.pack("<I", 2**31) + bytes(64), "2,147,483,648 dim"),
        (padded(header(1) + tensor("t", (2**32, 2**32)), 64), "it may be cut short"),
        (padded(header(1) + tensor("t", (4,)), 12), "it may be cut short"),
        (padded(header(1) + tensor("t", (4,), offset=2**62), 64), "it may be cut short"),
        (padded(header(1) + tensor("t", (4,), offset=3), 64), "not aligned to 32"),
        (padded(header(1) + tensor("t", (2, 33), kind=8), 99), "blocks of 32"),
        (padded(header(1) + tensor("t", (256,), kind=16), 99), "stored in IQ2_XXS; supported: F32"),
        (padded(header(1) + tensor("t", (4,), kind=9999), 99), "the unknown format 9999"),
        (padded(header(2) + 2 * tensor("t", (4,)), 64), "the tensor 't' occurs twice"),
        (padded(header(2) + tensor("t", (9,)) + tensor("u", (4,), offset=32), 64), "overlap"),
        (padded(header(1, 1) + string("general.alignment") + struct.pack("<II", 4, 3)
                + tensor("t", (4,)), 64), "expected a power of two"),
    ],
)  # fmt: skip
def test_damaged_and_crafted_files_are_refused(tmp_path, data, found):
    refused(tmp_path, data, found)


def test_every_cut_is_refused(tmp_path):
    whole = write_gguf(tmp_path / "a.gguf", METADATA, {"v": np.ones(5, np.float32)}).read_bytes()
    end = read_gguf(tmp_path / "a.gguf").tensors["v"].end
    for size in range(end):
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            read_gguf(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.gguf is missing"):
        read_gguf(tmp_path / "none.gguf")


def stored_raw(tmp_path: Path, data: np.ndarray, kind: str) -> np.ndarray:
    writer = gguf.GGUFWriter(tmp_path / "raw.gguf", "llama")
    writer.add_tensor("t", data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(tmp_path / "raw.gguf").read("t")


def random_blocks(size: int, halves: tuple[int, ...]) -> np.ndarray:
    """Rows of two random blocks; the 16-bit numbers at the bytes ``halves`` are small."""
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (3, 2, size), dtype=np.uint8)
    for place in halves:
        numbers = generator.uniform(-1, 1, (3, 2, 1)).astype(np.float16)
        blocks[..., place : place + 2] = numbers.view(np.uint8).reshape(3, 2, 2)
    return blocks


def half(block: np.ndarray, place: int) -> float:
    return float(block[place : place + 2].copy().view(np.float16)[0])


def q4_k(block: np.ndarray) -> list[float]:
    """Eight groups of 32: d · scale · code − dmin · minimum, scales and minima of 6 bits."""
    packed = [int(byte) for byte in block[4:16]]
    values: list[float] = []
    for group in range(8):
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
            minimum = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4
        codes = block[16 + 32 * (group // 2) : 48 + 32 * (group // 2)]
        for byte in codes:
            code = int(byte) >> 4 if group % 2 else int(byte) & 15
            values.append(half(block, 0) * scale * code - half(block, 2) * minimum)
    return values


def q6_k(block: np.ndarray) -> list[float]:
    """Sixteen groups of 16: d · scale · (code − 32), codes of 4 low and 2 high bits."""
    low, high, scales = block[:128], block[128:192], block[192:208].view(np.int8)
    values: list[float] = []
    for number in range(256):
        part, inside = divmod(number, 128)
        quarter, place = divmod(inside, 32)
        byte = int(low[64 * part + 32 * (quarter % 2) + place])
        bits = byte >> 4 if quarter >= 2 else byte & 15
        bits |= (int(high[32 * part + place]) >> 2 * quarter & 3) << 4
        values.append(half(block, 208) * int(scales[number // 16]) * (bits - 32))
    return values


@pytest.mark.parametrize(
    ("kind", "size", "halves", "slow"), [("Q4_K", 144, (0, 2), q4_k), ("Q6_K", 210, (208,), q6_k)]
)
def test_super_blocks_hold_what_the_format_says(tmp_path, kind, size, halves, slow):
    blocks = random_blocks(size, halves)
    expected = np.array([[value for block in row for value in slow(block)] for row in blocks])
    values = stored_raw(tmp_path, blocks.reshape(3, 2 * size), kind)
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "halves"),
    [("Q5_0", (0,)), ("Q5_1", (0, 2)), ("Q2_K", (80, 82)), ("Q3_K", (108,)), ("Q5_K", (0, 2))],
)
def test_other_blocks_are_read_whole(tmp_path, kind, halves):
    stored_as = gguf.GGMLQuantizationType[kind]
    blocks = random_blocks(gguf.GGML_QUANT_SIZES[stored_as][1], halves).reshape(3, -1)
    assert np.array_equal(stored_raw(tmp_path, blocks, kind), gguf.dequantize(blocks, stored_as))
