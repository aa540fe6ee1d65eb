"""Our codes, scales and minima, written as GGUF blocks and read by the ``gguf`` package."""

import numpy as np
import pytest
import torch

from dualflow.ops.quantised import Quantised, dequantise, quantise, unpack_nibbles
from dualflow.spec import QuantisedFormat
from dualflow.testing.tensors import seeded

gguf = pytest.importorskip("gguf")

INPUTS = 96


def blocks(matrix: Quantised) -> np.ndarray:
    """Rows of Q8_0 blocks (scale, 32 codes) or Q4_1 blocks (scale, minimum, 16 bytes)."""

    def raw(x_OG: torch.Tensor) -> np.ndarray:
        return x_OG.numpy()[..., None].view(np.uint8)

    if matrix.minimum is None:
        codes = matrix.codes.unflatten(1, (-1, 32)).numpy().view(np.uint8)
        parts = [raw(matrix.scale), codes]
    else:
        # Byte j of a block holds inputs j and j + 16; ours holds 2 j and 2 j + 1.
        q_OGC = unpack_nibbles(matrix.codes, INPUTS).unflatten(1, (-1, 32))
        codes = (q_OGC[..., :16] | q_OGC[..., 16:] << 4).numpy()
        parts = [raw(matrix.scale), raw(matrix.minimum), codes]
    joined = np.concatenate(parts, axis=-1)
    return joined.reshape(len(joined), -1)


@pytest.mark.parametrize(("kind", "name"), [("int8", "Q8_0"), ("int4", "Q4_1")])
def test_the_information_is_that_of_gguf(kind: QuantisedFormat, name: str):
    matrix = quantise(torch.randn(7, INPUTS, generator=seeded("gguf")) * 0.1, kind)
    theirs = gguf.dequantize(blocks(matrix), getattr(gguf.GGMLQuantizationType, name))
    ours = dequantise(matrix, INPUTS)
    assert np.array_equal(theirs.reshape(7, INPUTS), ours.numpy())


def test_q8_0_of_gguf_comes_back_with_its_own_codes_and_scales():
    weight = torch.randn(7, INPUTS, generator=seeded("gguf")) * 0.1
    kind = gguf.GGMLQuantizationType.Q8_0
    stored = gguf.quantize(weight.numpy(), kind)
    floats = torch.from_numpy(gguf.dequantize(stored, kind)).reshape(7, INPUTS)
    assert np.array_equal(blocks(quantise(floats, "int8")), stored.reshape(7, -1))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1"])
def test_4_bit_weights_of_gguf_come_back_exactly(name: str):
    weight = torch.randn(40, INPUTS, generator=seeded("gguf")) * 0.1
    kind = getattr(gguf.GGMLQuantizationType, name)
    stored = gguf.quantize(weight.numpy(), kind)
    floats = torch.from_numpy(gguf.dequantize(stored, kind)).reshape(weight.shape)
    assert torch.equal(dequantise(quantise(floats, "int4"), INPUTS), floats)
