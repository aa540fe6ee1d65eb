"""Matrices in 8 or 4 bits: groups of 32 inputs of one output share a float16 scale.

int8    w = scale · q,            q in −127 .. 127   (what GGUF's Q8_0 holds)
int4    w = scale · q + minimum,  q in 0 .. 15       (what GGUF's Q4_1 holds)

A scale of int8 is never negative. One of int4 may be: the grid then counts down from its minimum.
That is how a group of GGUF's Q4_0 with a negative scale keeps its grid.

Here O counts outputs, K inputs, G = ceil(K / 32) groups and C the inputs of a group; the last group
is shorter where K is no multiple of 32. N counts groups of the same length.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dualflow.spec import WEIGHT_GROUP, QuantisedFormat

VALUES_PER_BLOCK = 2**20
"""How many weights are widened at a time, so that a vocabulary's matrix never is as a whole."""

GROUPS_PER_FIT = 2**12
"""How many groups are fitted at a time: their weights in float64 stay in a core's cache."""

LEVELS = 15
STEPS = range(LEVELS, 7, -1)
"""In how many steps the range of an int4 group may be divided."""

CLIPS = (0.95, 0.9, 0.85)
"""Which parts of a range may be divided in 15 steps, its ends clipped."""


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
    """The matrix in ``kind``, on the device of ``weight_OK``; every code is the nearest its group's
    scale and minimum allow.

    int8: no weight moves by more than half a scale. int4: of a few scales and minima those of the
    least squared error. That is never more than with the range divided by 15 steps, and 0 for
    weights that a Q4_0 or Q4_1 group holds exactly, if they span 8 steps or more. A weight inside
    its grid moves by at most half a scale; one beyond an end of it moves to that end.

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
    wide_OK = weight_OK.to("cpu", torch.float64)
    if not wide_OK.isfinite().all():
        raise ValueError(
            f"{int((~wide_OK.isfinite()).sum()):,} weights are not finite; they cannot be quantised"
        )
    whole = wide_OK.shape[1] // WEIGHT_GROUP * WEIGHT_GROUP
    parts = [
        _quantise_groups(part.unflatten(1, (-1, size)), kind)
        for part, size in (
            (wide_OK[:, :whole], WEIGHT_GROUP),
            (wide_OK[:, whole:], wide_OK.shape[1] - whole),
        )
        if part.shape[1]
    ]
    q_OK, scale, minimum = (torch.cat(same, dim=1) for same in zip(*parts, strict=True))
    if not (scale.isfinite().all() and minimum.isfinite().all()):
        raise ValueError(
            f"a weight of {float(wide_OK.abs().max()):.3g} is too large for {kind} with a float16 "
            "scale"
        )
    return (q_OK.to(torch.int8) if kind == "int8" else pack_nibbles(q_OK)), scale, minimum


def _quantise_groups(w_OGC: Tensor, kind: QuantisedFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [O, G · C] in float64 or uint8, scale and minimum [O, G] of groups of one length."""
    if kind == "int8":
        scale = _scale(w_OGC.abs().amax(-1), 127)
        wide = scale.double()[..., None]
        q_OGC = torch.where(wide > 0, w_OGC / wide, 0.0).round_().clamp_(-127, 127)
        return q_OGC.flatten(1), scale, torch.zeros_like(scale)
    fits = [_fit(w_NC.T.contiguous()) for w_NC in w_OGC.flatten(0, 1).split(GROUPS_PER_FIT)]
    q_NC, scale, minimum = (torch.cat(parts) for parts in zip(*fits, strict=True))
    shape = w_OGC.shape[:2]
    return q_NC.view(w_OGC.shape).flatten(1), scale.view(shape), minimum.view(shape)


def _fit(w_CN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 codes [N, C] and the float16 scale and minimum [N] of int4 groups; these are infinite
    where the weights are too large.
    """
    lowest, highest = w_CN.aminmax(dim=0)
    span = highest - lowest
    minimum = _half_below(lowest)
    scale = _scale(highest - minimum.double(), LEVELS)
    best = _Best(_Coded(w_CN, minimum.double(), scale.double()).e_e, scale, minimum)
    for steps in STEPS:
        coded = _Coded(w_CN, lowest, (span / steps).half().double())
        best.offer_refit(coded)
        best.offer_same_points(coded, steps)
    for part in CLIPS:
        best.offer_refit(_Coded(w_CN, lowest + span * (1 - part) / 2, span * part / LEVELS))
    # The nearest codes of the best so far may differ from those it was fitted to.
    best.offer_refit(_Coded(w_CN, best.minimum.double(), best.scale.double()))
    q_CN = _codes(w_CN - best.minimum.double(), best.scale.double())
    return q_CN.T.to(torch.uint8), best.scale, best.minimum


class _Coded:
    """Groups rounded to codes r of the grid ``start + step · r`` with what is left, e: their sums
    over each group give the squared error of these codes on any other grid.
    """

    def __init__(self, w_CN: Tensor, start_N: Tensor, step_N: Tensor) -> None:
        self.size, self.start, self.step = len(w_CN), start_N, step_N
        e_CN = w_CN - start_N
        r_CN = _codes(e_CN, step_N)
        e_CN.addcmul_(r_CN, step_N, value=-1)
        self.e, self.r = e_CN.sum(0), r_CN.sum(0)
        self.e_r = (e_CN * r_CN).sum(0)
        self.e_e, self.r_r = e_CN.square_().sum(0), r_CN.square_().sum(0)

    def error(self, more_step_N: Tensor, more_start_N: Tensor) -> Tensor:
        """Σ (e − more_step · r − more_start)², not below 0."""
        cross = more_step_N * (more_start_N * self.r - self.e_r) - more_start_N * self.e
        squares = more_step_N.square() * self.r_r + self.size * more_start_N.square()
        return (self.e_e + 2 * cross + squares).clamp_(min=0)


class _Best:
    """The scale and minimum of least squared error so far. Of equals the first stays."""

    def __init__(self, error_N: Tensor, scale_N: Tensor, minimum_N: Tensor) -> None:
        self.error, self.scale, self.minimum = error_N, scale_N, minimum_N

    def offer(self, error_N: Tensor, scale_N: Tensor, minimum_N: Tensor) -> None:
        """Take these where they are better; an error of nan, from an infinite scale, is not."""
        better = error_N < self.error
        self.error = torch.where(better, error_N, self.error)
        self.scale = torch.where(better, scale_N, self.scale)
        self.minimum = torch.where(better, minimum_N, self.minimum)

    def offer_refit(self, coded: _Coded) -> None:
        """The line through codes and weights: the least squared error that these codes can have."""
        spread = coded.size * coded.r_r - coded.r.square()
        more_step = (coded.size * coded.e_r - coded.r * coded.e) / spread
        scale = (coded.step + more_step).half()
        more_step = scale.double() - coded.step  # what float16 left of it
        minimum = (coded.start + (coded.e - more_step * coded.r) / coded.size).half()
        self.offer(coded.error(more_step, minimum.double() - coded.start), scale, minimum)

    def offer_same_points(self, coded: _Coded, steps: int) -> None:
        """The grid of codes 0 .. ``steps``, counted from any point that 15 steps allow, upwards or
        downwards: float16 may hold one such point and not the others.
        """
        scale, none = coded.step.half(), torch.zeros_like(coded.step)
        below, above = range(steps - LEVELS, 1), range(steps, LEVELS + 1)
        for points, signed in ((below, scale), (above, -scale)):
            distance_PN = torch.tensor(points, dtype=torch.float64)[:, None] * coded.step
            minimum_PN = (coded.start + distance_PN).half()
            moved_PN = minimum_PN.double() - distance_PN - coded.start
            error_PN = coded.error(none, moved_PN).nan_to_num_(nan=math.inf)
            error, point = error_PN.min(0, keepdim=True)
            self.offer(error[0], signed, minimum_PN.gather(0, point)[0])


def _codes(above_CN: Tensor, scale_N: Tensor) -> Tensor:
    """The nearest of 0 .. 15 for what is ``above`` a minimum; 0 where the scale is 0."""
    return (above_CN * _inverse(scale_N)).round_().clamp_(0, LEVELS)


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


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale in float64, and 0 of 0."""
    wide = scale.double()
    return torch.where(wide != 0, 1 / wide, 0.0)


def _per_input(x_OG: Tensor, num_inputs: int) -> Tensor:
    """Each group's value at each of its inputs: [O, K]."""
    return x_OG.repeat_interleave(WEIGHT_GROUP, dim=1)[:, :num_inputs]


def _split(matrix: Quantised, rows: int) -> list[Quantised]:
    """The matrix in blocks of ``rows`` outputs."""
    codes, scale = matrix.codes.split(rows), matrix.scale.split(rows)
    minimum = [None] * len(codes) if matrix.minimum is None else matrix.minimum.split(rows)
    return [Quantised(*parts) for parts in zip(codes, scale, minimum, strict=True)]
