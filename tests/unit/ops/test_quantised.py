"""Quantised matrices against their slow twin, and byte for byte where other code reads them."""

import math
from collections.abc import Iterator

import pytest
import torch

from dualflow.ops import quantised, reference
from dualflow.ops.quantised import dequantise, quantise
from dualflow.spec import QuantisedFormat
from dualflow.testing.tensors import same, seeded

KINDS: tuple[QuantisedFormat, ...] = ("int8", "int4")
LEVELS = {"int8": 127, "int4": 15}
WIDTHS = (1, 7, 31, 32, 33, 64, 71)


def matrix(
    inputs: int, outputs: int = 5, size: float = 1.0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Weights around ``size``, off centre."""
    noise = torch.randn(outputs, inputs, generator=seeded("weights", inputs, outputs))
    return ((noise + 0.3) * size).to(dtype)


def codes_of(found: quantised.Quantised, inputs: int) -> torch.Tensor:
    packed = found.minimum is not None
    return quantised.unpack_nibbles(found.codes, inputs) if packed else found.codes


Group = tuple[list[int], float, float]


def groups_of(
    weight: torch.Tensor, found: quantised.Quantised
) -> Iterator[tuple[list[float], Group]]:
    """Each group: its weights as numbers, and its codes, scale and minimum."""
    codes = codes_of(found, weight.shape[1])
    for row in range(len(weight)):
        for group in range(quantised.group_count(weight.shape[1])):
            columns = slice(32 * group, 32 * group + 32)
            minimum = 0.0 if found.minimum is None else found.minimum[row, group].item()
            scale = found.scale[row, group].item()
            values = weight[row, columns].double().tolist()
            yield values, (codes[row, columns].tolist(), scale, minimum)


def error_of_even_division(values: list[float]) -> float:
    return reference.squared_error(values, *reference.quantise_group(values, 15))


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-7, 1e4])
@pytest.mark.parametrize("inputs", WIDTHS)
def test_int8_equals_the_slow_twin_group_by_group(inputs: int, size: float):
    weight = matrix(inputs, size=size)
    for values, found in groups_of(weight, quantise(weight, "int8")):
        assert found == reference.quantise_group(values, 127)


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-7, 1e4])
@pytest.mark.parametrize("inputs", WIDTHS)
def test_int4_has_the_squared_error_of_the_slow_twin(inputs: int, size: float):
    weight = matrix(inputs, size=size)
    for values, found in groups_of(weight, quantise(weight, "int4")):
        least = reference.squared_error(values, *reference.fitted_group(values))
        error = reference.squared_error(values, *found)  # equally good grids may differ
        assert error == pytest.approx(least, rel=1e-9, abs=1e-26 * max(map(abs, values)) ** 2)
        assert error <= error_of_even_division(values) * (1 + 1e-12)


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_int4_is_better_than_an_even_division_of_the_range(size: float):
    weight = matrix(64, 20, size)
    ours = even = 0.0
    for values, found in groups_of(weight, quantise(weight, "int4")):
        ours += reference.squared_error(values, *found)
        even += error_of_even_division(values)
    assert ours < 0.9 * even


def float16_grid(outputs: int, groups: int, size: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Random float16 scales above 0, and minima, of about ``size``: [O, G]."""
    generator = seeded("grid", outputs, groups)
    scale = (torch.rand(outputs, groups, generator=generator) + 0.1) * size
    minimum = torch.randn(outputs, groups, generator=generator) * 8 * size
    return scale.half(), minimum.half()


@pytest.mark.parametrize("ends", [(0, 15), (1, 14), (0, 9), (6, 15), (3, 11)])
@pytest.mark.parametrize("size", [1.0, 0.01])
def test_q4_1_weights_come_back_exactly_whichever_codes_they_use(
    ends: tuple[int, int], size: float
):
    scale, minimum = float16_grid(40, 4, size)
    lowest, highest = ends
    codes = torch.randint(lowest, highest + 1, (40, 4, 32), generator=seeded("codes", *ends))
    codes[..., 3], codes[..., 21] = lowest, highest
    packed = quantised.pack_nibbles(codes.flatten(1))
    floats = dequantise(quantised.Quantised(packed, scale, minimum), 128)
    assert torch.equal(dequantise(quantise(floats, "int4"), 128), floats)


def test_q4_0_weights_come_back_exactly_whichever_sign_their_scale_has():
    scale, _ = float16_grid(40, 4, 0.01)
    scale[::2] *= -1
    codes = torch.randint(-8, 8, (40, 4, 32), generator=seeded("codes"))
    codes[..., 5], codes[..., 6] = -8, 7
    floats = (codes * scale.float()[..., None]).flatten(1)
    found = quantise(floats, "int4")
    assert torch.equal(dequantise(found, 128), floats)
    assert (found.scale < 0).any() and (found.scale > 0).any()


@pytest.mark.parametrize("kind", KINDS)
def test_widening_is_scale_times_code_plus_minimum(kind: QuantisedFormat):
    found = quantise(matrix(71), kind)
    wide = dequantise(found, 71, torch.float64)
    codes = codes_of(found, 71)
    for row, column in ((0, 0), (1, 31), (2, 32), (4, 70)):
        group = column // 32
        minimum = 0.0 if found.minimum is None else found.minimum[row, group].item()
        expected = found.scale[row, group].item() * codes[row, column].item() + minimum
        assert wide[row, column].item() == expected


@pytest.mark.parametrize("size", [1.0, 1e-3, 3e-7, 1e-9, 5e5])
def test_no_weight_of_int8_moves_by_more_than_half_a_scale(size: float):
    weight = matrix(71, 40, size)
    found = quantise(weight, "int8")
    error = (dequantise(found, 71, torch.float64) - weight.double()).abs()
    half = found.scale.double().repeat_interleave(32, 1)[:, :71] / 2
    assert (error <= half * (1 + 1e-12)).all()


@pytest.mark.parametrize("size", [1.0, 1e-3, 3e-7, 1e-9, 1e4])
def test_int4_moves_weights_by_half_a_scale_at_most_or_to_the_end_of_their_grid(size: float):
    weight = matrix(71, 40, size)
    for values, (codes, scale, minimum) in groups_of(weight, quantise(weight, "int4")):
        ends = sorted([minimum, minimum + 15 * scale])
        for value, code in zip(values, codes, strict=True):
            inside = min(max(value, ends[0]), ends[1])
            assert abs(scale * code + minimum - inside) <= abs(scale) / 2 * (1 + 1e-9)


def test_a_narrow_group_far_from_zero_is_kept_within_its_range():
    weight = 1.0 + 1e-3 * torch.rand(1, 32, generator=seeded("narrow"))
    found = quantise(weight, "int4")
    error = (dequantise(found, 32, torch.float64) - weight.double()).abs().max()
    assert error <= 1e-3 / 15


@pytest.mark.parametrize("inputs", [32, 35])
def test_a_matrix_of_no_outputs_has_no_codes(inputs: int):
    for kind in KINDS:
        found = quantise(torch.zeros(0, inputs), kind)
        assert dequantise(found, inputs).shape == (0, inputs)


@pytest.mark.parametrize("inputs", [32, 35])
def test_the_largest_float16_weights_are_kept(inputs: int):
    weight = torch.full((1, inputs), 60_000.0)
    weight[:, ::3] = -60_000
    found = quantise(weight, "int4")
    assert torch.allclose(dequantise(found, inputs), weight, rtol=1e-3)


def test_a_short_last_group_is_fitted_to_its_own_weights_alone():
    weight = matrix(37, 20)
    found, short = quantise(weight, "int4"), quantise(weight[:, 32:], "int4")
    assert torch.equal(codes_of(found, 37)[:, 32:], codes_of(short, 5))
    assert same(found.scale[:, 1:], short.scale)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.0, 0.25, -0.25])
def test_a_constant_group_comes_back_exactly_where_float16_has_it(
    kind: QuantisedFormat, value: float
):
    found = quantise(torch.full((2, 40), value), kind)
    wide = dequantise(found, 40)
    assert torch.allclose(wide, torch.full((2, 40), value), rtol=1e-3, atol=0)
    assert (kind == "int8") or torch.equal(wide, torch.full((2, 40), value))


@pytest.mark.parametrize("kind", KINDS)
def test_quantising_what_was_quantised_changes_no_weight(kind: QuantisedFormat):
    weight = dequantise(quantise(matrix(64, 40), kind), 64, torch.float32)
    assert torch.equal(dequantise(quantise(weight, kind), 64), weight)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_do_not_depend_on_the_number_format(kind: QuantisedFormat):
    weight = matrix(40, dtype=torch.bfloat16)
    expected = quantise(weight, kind)
    for dtype in (torch.float32, torch.float64):
        for one, other in zip(quantise(weight.to(dtype), kind), expected, strict=True):
            assert same(one, other)


def test_int8_layout():
    found = quantise(matrix(71), "int8")
    assert found.codes.dtype == torch.int8 and found.codes.shape == (5, 71)
    assert found.scale.dtype == torch.float16 and found.scale.shape == (5, 3)
    assert found.minimum is None
    assert found.codes.min() >= -127


def test_int4_layout_has_the_low_half_first():
    found = quantise(torch.tensor([[0.0, 15.0, 8.0, 3.0, 1.0]]), "int4")
    assert found.scale.tolist() == [[1.0]]
    assert found.codes.dtype == torch.uint8
    assert found.codes.tolist() == [[0 | 15 << 4, 8 | 3 << 4, 1]]
    assert found.minimum is not None and found.minimum.tolist() == [[0.0]]
    assert found.minimum.dtype == found.scale.dtype == torch.float16


@pytest.mark.parametrize("inputs", WIDTHS)
def test_unpacking_undoes_packing(inputs: int):
    codes = torch.randint(16, (3, inputs), generator=seeded("codes"), dtype=torch.uint8)
    packed = quantised.pack_nibbles(codes)
    assert packed.shape == (3, math.ceil(inputs / 2))
    assert torch.equal(quantised.unpack_nibbles(packed, inputs), codes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers_are_refused(kind: QuantisedFormat, wrong: float):
    weight = matrix(40)
    weight[2, 33] = wrong
    with pytest.raises(ValueError, match="1 weights are not finite"):
        quantise(weight, kind)


@pytest.mark.parametrize(("kind", "size"), [("int8", 1e7), ("int4", 2e6), ("int4", -7e4)])
def test_weights_beyond_a_float16_scale_are_refused(kind: QuantisedFormat, size: float):
    weight = torch.zeros(2, 40)
    weight[:, 1:] = size
    with pytest.raises(
        ValueError, match=rf"of {abs(size):.0e}.* is too large for {kind}".replace("+", r"\+")
    ):
        quantise(weight, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_product_is_that_of_the_dequantised_matrix(kind: QuantisedFormat, dtype: torch.dtype):
    found = quantise(matrix(71, 9), kind)
    x = torch.randn(4, 71, generator=seeded("x")).to(dtype)
    bias = torch.randn(9, generator=seeded("bias")).to(dtype)
    expected = torch.nn.functional.linear(x, dequantise(found, 71, dtype), bias)
    assert torch.equal(quantised.linear(x, found, bias), expected)
    assert quantised.linear(x, found).dtype == dtype


@pytest.mark.parametrize("kind", KINDS)
def test_work_in_blocks_gives_the_same(
    kind: QuantisedFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = matrix(71, 9), torch.randn(4, 71, generator=seeded("x"), dtype=torch.float64)
    bias = torch.randn(9, generator=seeded("bias"), dtype=torch.float64)
    found = quantise(weight, kind)
    whole = quantised.linear(x, found, bias)
    monkeypatch.setattr(quantised, "VALUES_PER_BLOCK", 2 * 71)
    torch.testing.assert_close(quantised.linear(x, found, bias), whole, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(quantised, "VALUES_PER_BLOCK", 1)
    again = quantise(weight, kind)
    assert torch.equal(again.codes, found.codes) and torch.equal(again.scale, found.scale)
    monkeypatch.setattr(quantised, "GROUPS_PER_FIT", 1)
    again = quantise(weight, kind)
    assert torch.equal(dequantise(again, 71), dequantise(found, 71))


@pytest.mark.parametrize("kind", KINDS)
def test_an_embedding_gives_rows_in_any_shape_and_format(kind: QuantisedFormat):
    found = quantise(matrix(33, 9), kind)
    table = dequantise(found, 33, torch.bfloat16)
    ids = torch.tensor([[8, 0, 3], [3, 3, 1]])
    assert torch.equal(quantised.embedding(ids, found, 33, torch.bfloat16), table[ids])
    assert quantised.embedding(ids[0, :0], found, 33, torch.float32).shape == (0, 33)
