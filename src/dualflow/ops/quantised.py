"""Matrices in 8 or 4 bits: groups of 32 inputs of one output share a float16 scale.

int8    w = scale · q,            q in −127 .. 127   (what GGUF's Q8_0 holds)
int4    w = scale · q + minimum,  q in 0 .. 15       (what GGUF's Q4_1 holds)

Here O counts outputs, K inputs, G = ceil(K / 32) groups and C the inputs of a group; the last group
is shorter where K is no multiple of 32.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dualflow.spec import WEIGHT_GROUP, QuantisedFormat

VALUES_PER_BLOCK = 2**20
"""How many weights are widened at a time, so that a vocabulary's matrix never is as a whole."""


class Quantised(NamedTuple):
    """One [O, K] matrix.

    codes:    int8 [O, K]; or for int4 uint8 [O, ceil(K / 2)], input 2j in the low half of byte j
              and input 2j + 1 in the high half (0 where there is no such input).
    scale:    float16 [O, G].
    minimum:  float16 [O, G] for int4; None for int8.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None


def group_count(num_inputs: int) -> int:
    """G of a matrix of ``num_inputs`` inputs."""
    return -(-num_inputs // WEIGHT_GROUP)


def quantise(weight_OK: Tensor, kind: QuantisedFormat) -> Quantised:
    """The codes nearest to ``weight_OK``, each within half a scale of it, on its device.

    Computed in float64 on the CPU: equal weights give equal codes, whatever their number format and
    device. Raises ``ValueError``: a weight is not finite, or too large for a float16 scale.
    """
    rows = max(1, 4 * VALUES_PER_BLOCK // weight_OK.shape[1])
    blocks = [_quantise_rows(block, kind) for block in weight_OK.detach().split(rows)]
    codes, scale, minimum = zip(*blocks, strict=True)

    def joined(parts: tuple[Tensor, ...]) -> Tensor:
        return torch.cat(parts).to(weight_OK.device)

    return Quantised(joined(codes), joined(scale), joined(minimum) if kind == "int4" else None)


def dequantise(matrix: Quantised, num_inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights [O, K], computed in float32 (float64 for float64) and rounded to ``dtype``."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if matrix.minimum is None:
        return (matrix.codes * _per_input(matrix.scale.to(wide), num_inputs)).to(dtype)
    codes = unpack_nibbles(matrix.codes, num_inputs)
    weight_OK = codes * _per_input(matrix.scale.to(wide), num_inputs)
    return weight_OK.add_(_per_input(matrix.minimum.to(wide), num_inputs)).to(dtype)


def linear(x_RK: Tensor, matrix: Quantised, bias_O: Tensor | None = None) -> Tensor:
    """``F.linear`` with the weights dequantised to the input's dtype: [R, O]."""
    num_inputs = x_RK.shape[-1]
    rows = max(1, VALUES_PER_BLOCK // num_inputs)
    matrices = _split(matrix, rows)
    biases = [None] * len(matrices) if bias_O is None else bias_O.to(x_RK.dtype).split(rows)
    blocks = [
        F.linear(x_RK, dequantise(block, num_inputs, x_RK.dtype), bias)
        for block, bias in zip(matrices, biases, strict=True)
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-1)


def embedding(ids: Tensor, matrix: Quantised, num_inputs: int, dtype: torch.dtype) -> Tensor:
    """Rows of the matrix: [..., K] for ids [...]."""
    flat = ids.flatten()
    chosen = Quantised(
        matrix.codes[flat],
        matrix.scale[flat],
        None if matrix.minimum is None else matrix.minimum[flat],
    )
    return dequantise(chosen, num_inputs, dtype).unflatten(0, ids.shape)


def pack_nibbles(codes_OK: Tensor) -> Tensor:
    """Codes 0 .. 15 as uint8 [O, ceil(K / 2)], two in a byte, the low half first."""
    even = F.pad(codes_OK.to(torch.uint8), (0, codes_OK.shape[1] % 2)).unflatten(1, (-1, 2))
    return even[..., 0] | (even[..., 1] << 4)


def unpack_nibbles(packed: Tensor, num_inputs: int) -> Tensor:
    """The inverse of ``pack_nibbles``: uint8 [O, K]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)[:, :num_inputs]


def _quantise_rows(weight_OK: Tensor, kind: QuantisedFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and minimum of some rows. The minimum of int8 is 0."""
    num_inputs = weight_OK.shape[1]
    wide_OK = weight_OK.to("cpu", torch.float64)
    if not wide_OK.isfinite().all():
        raise ValueError(
            f"{int((~wide_OK.isfinite()).sum()):,} weights are not finite; they cannot be quantised"
        )
    # A short last group is filled up with its own last weight, which changes no extreme.
    missing = group_count(num_inputs) * WEIGHT_GROUP - num_inputs
    full = torch.cat([wide_OK, wide_OK[:, -1:].expand(-1, missing)], dim=1)
    w_OGC = full.unflatten(1, (-1, WEIGHT_GROUP))
    if kind == "int8":
        minimum = torch.zeros(w_OGC.shape[:2], dtype=torch.float16)
        scale = _scale(w_OGC.abs().amax(-1), 127)
        q_OGC = _divide(w_OGC, scale).round_().clamp_(-127, 127)
    else:
        minimum = _half_below(w_OGC.amin(-1))
        above = w_OGC - minimum.double()[..., None]
        scale = _scale(above.amax(-1), 15)
        q_OGC = _divide(above, scale).round_().clamp_(0, 15)
    if not (scale.isfinite().all() and minimum.isfinite().all()):
        raise ValueError(
            f"a weight of {float(wide_OK.abs().max()):.3g} is too large for {kind} with a float16 "
            "scale"
        )
    q_OK = q_OGC.flatten(1)[:, :num_inputs]
    return (q_OK.to(torch.int8) if kind == "int8" else pack_nibbles(q_OK)), scale, minimum


def _scale(largest_OG: Tensor, levels: int) -> Tensor:
    """The float16 nearest to ``largest / levels``, or the one above it where the largest value
    would lie more than half a step beyond the last level (float16 is coarse near 0).
    """
    scale = (largest_OG / levels).half()
    short = largest_OG > scale.double() * (levels + 0.5)
    return torch.where(short, _next_half(scale), scale)


def _half_below(x: Tensor) -> Tensor:
    """The largest float16 that is not above ``x``; −inf where there is none."""
    half = x.half()
    return torch.where(half.double() > x, -_next_half(-half), half)


def _next_half(x: Tensor) -> Tensor:
    """The next float16 above ``x`` (float16): one more in its bits, or one less where negative."""
    bits = (x + 0.0).view(torch.int16)  # + 0.0: there is one zero
    return torch.where(bits < 0, bits - 1, bits + 1).view(torch.float16)


def _divide(x_OGC: Tensor, scale_OG: Tensor) -> Tensor:
    """The quotient, 0 where the scale is 0."""
    scale = scale_OG.double()[..., None]
    return torch.where(scale > 0, x_OGC / scale, 0.0)


def _per_input(x_OG: Tensor, num_inputs: int) -> Tensor:
    """Each group's value at each of its inputs: [O, K]."""
    return x_OG.repeat_interleave(WEIGHT_GROUP, dim=1)[:, :num_inputs]


def _split(matrix: Quantised, rows: int) -> list[Quantised]:
    """The matrix in blocks of ``rows`` outputs."""
    codes, scale = matrix.codes.split(rows), matrix.scale.split(rows)
    minimum = [None] * len(codes) if matrix.minimum is None else matrix.minimum.split(rows)
    return [Quantised(*parts) for parts in zip(codes, scale, minimum, strict=True)]
