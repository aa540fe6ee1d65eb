"""Whatever the weights, codes stay in range and no weight moves by more than half a scale."""

from typing import Literal

import torch
from hypothesis import given
from hypothesis import strategies as st

from dualflow.ops.quantised import dequantise, group_count, quantise, unpack_nibbles

weights = st.lists(
    st.floats(-60_000, 60_000, width=32) | st.floats(-1e-6, 1e-6, width=64), min_size=1, max_size=70
)


@given(weights, st.sampled_from(["int8", "int4"]))
def test_every_weight_is_within_half_a_scale(values: list[float], kind: Literal["int8", "int4"]):
    weight = torch.tensor([values], dtype=torch.float64)
    found = quantise(weight, kind)
    assert found.scale.shape == (1, group_count(len(values)))
    assert (found.scale >= 0).all()
    half = found.scale.double().repeat_interleave(32, 1)[:, : len(values)] / 2
    error = (dequantise(found, len(values), torch.float64) - weight).abs()
    assert (error <= half * (1 + 1e-9) + 1e-12 * weight.abs()).all()
    if kind == "int8":
        assert found.codes.min() >= -127
    else:
        assert unpack_nibbles(found.codes, len(values)).max() <= 15
