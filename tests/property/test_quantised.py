"""Whatever the weights, codes stay in range, no int8 weight moves by more than half a scale, and
int4 is never worse than an even division of the range.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dualflow.ops.quantised import dequantise, group_count, quantise, unpack_nibbles
from dualflow.ops.reference import quantise_group, squared_error

weights = st.lists(
    st.floats(-60_000, 60_000, width=32) | st.floats(-1e-6, 1e-6, width=64), min_size=1, max_size=70
)


@given(weights)
def test_every_int8_weight_is_within_half_a_scale(values: list[float]):
    weight = torch.tensor([values], dtype=torch.float64)
    found = quantise(weight, "int8")
    assert found.scale.shape == (1, group_count(len(values)))
    assert (found.scale >= 0).all()
    half = found.scale.double().repeat_interleave(32, 1)[:, : len(values)] / 2
    error = (dequantise(found, len(values), torch.float64) - weight).abs()
    assert (error <= half * (1 + 1e-9) + 1e-12 * weight.abs()).all()
    assert found.codes.min() >= -127


@given(weights)
def test_int4_is_never_worse_than_an_even_division(values: list[float]):
    found = quantise(torch.tensor([values], dtype=torch.float64), "int4")
    assert found.minimum is not None
    assert found.scale.shape == found.minimum.shape == (1, group_count(len(values)))
    codes = unpack_nibbles(found.codes, len(values))[0].tolist()
    assert max(codes) <= 15
    for group, (scale, minimum) in enumerate(
        zip(found.scale[0].tolist(), found.minimum[0].tolist(), strict=True)
    ):
        here = slice(32 * group, 32 * group + 32)
        error = squared_error(values[here], codes[here], scale, minimum)
        even = squared_error(values[here], *quantise_group(values[here], 15))
        rounding = 1e-26 * max(map(abs, values[here])) ** 2
        assert error <= even * (1 + 1e-9) + rounding
