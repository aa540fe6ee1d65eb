"""Rotary scaling in GGUF metadata: linear and yarn by their keys, llama3 by a tensor of factors."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualflow.spec import RopeScaling

ROPE_FREQS = "rope_freqs.weight"
"""What every frequency is divided by; llama.cpp's converter writes Llama 3's scaling so."""

_KEY = "rope.scaling."
_POSITIONS = [2**power for power in range(4, 24)]
_TOLERANCE = 1e-6


def read_scaling(metadata: Mapping[str, Any], prefix: str) -> RopeScaling | None:
    """The scaling that the keys ``{prefix}rope.scaling.*`` ask for.

    Raises ``ValueError`` for kinds that we do not know, and where a key that one needs is missing.
    """
    values = {
        key.removeprefix(prefix + _KEY): value
        for key, value in metadata.items()
        if key.startswith(prefix + _KEY)
    }
    kind = values.get("type", "linear")  # as llama.cpp has it
    factor = values.get("factor", 1.0)
    if type(factor) is not float or not 0 <= factor < math.inf:
        raise ValueError(f"{prefix}{_KEY}factor is {factor!r}; expected a number from 1 up")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        attention = values.get("attn_factor", 1.0)
        if attention != 1.0 or factor not in (0.0, 1.0):
            raise ValueError(
                f"{prefix}{_KEY}type is {kind!r} with factor {factor} and attn_factor {attention}; "
                "expected 1.0 for both"
            )
        return None
    attention = values.get("attn_factor", 1.0)
    if kind == "linear" and attention == 1.0:
        return RopeScaling(kind="linear", factor=factor)
    original = values.get("original_context_length")
    if kind == "yarn":
        if type(original) is not int:
            raise ValueError(f"{prefix}{_KEY}original_context_length is missing; yarn needs it")
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_position=original,
            attention_factor=None if attention == 1.0 else attention * _yarn_attention(factor),
        )
    raise ValueError(
        f"{prefix}{_KEY}type is {kind!r} (attn_factor {attention}), which is not supported; "
        "supported: 'none', 'linear' (attn_factor 1.0), 'yarn'"
    )


def write_scaling(scaling: RopeScaling | None) -> dict[str, Any]:
    """The keys that say ``scaling``, without the architecture. Raises ``ValueError`` where they
    cannot; ``llama3`` needs none (``llama3_divisors``).
    """
    if scaling is None or scaling.kind == "llama3":
        return {}
    keys: dict[str, Any] = {f"{_KEY}type": scaling.kind, f"{_KEY}factor": float(scaling.factor)}
    if scaling.kind == "linear":
        return keys
    usual = RopeScaling(kind="yarn", factor=2.0, original_max_position=1)
    for field in ("beta_fast", "beta_slow", "truncate"):
        value, expected = getattr(scaling, field), getattr(usual, field)
        if value != expected:
            raise ValueError(
                f"rope_scaling.{field} is {value}; a GGUF file can only express {expected}"
            )
    assert scaling.original_max_position is not None
    keys[f"{_KEY}original_context_length"] = scaling.original_max_position
    if scaling.attention_factor is not None:
        keys[f"{_KEY}attn_factor"] = scaling.attention_factor / _yarn_attention(scaling.factor)
    return keys


def llama3_divisors(scaling: RopeScaling, head_size: int, theta: float) -> NDArray[np.float32]:
    """[H/2]: what ``llama3`` divides each frequency by."""
    assert scaling.original_max_position is not None
    frequencies = theta ** -(np.arange(0, head_size, 2) / head_size)
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clip(0, 1)
    return (1 / (kept + (1 - kept) / scaling.factor)).astype(np.float32)


def find_llama3(divisors: NDArray[np.float32], head_size: int, theta: float) -> RopeScaling | None:
    """The ``llama3`` scaling with its usual ramp that divides by just these numbers; None: they
    are all 1.

    A file has the numbers, not what they were made of. Raises ``ValueError`` where no number of
    original positions that is a power of two gives them.
    """
    if divisors.shape != (head_size // 2,):
        raise ValueError(f"{ROPE_FREQS} has the shape {list(divisors.shape)}")
    if (divisors == 1).all():
        return None
    factor = float(str(divisors.max()))
    if factor >= 1:
        for positions in _POSITIONS:
            found = RopeScaling(kind="llama3", factor=factor, original_max_position=positions)
            if np.allclose(llama3_divisors(found, head_size, theta), divisors, _TOLERANCE, 0):
                return found
    raise ValueError(
        f"{ROPE_FREQS} holds rotary factors that are not those of a llama3 scaling (low 1, high 4, "
        "of a power of two); other factors are not supported"
    )


def _yarn_attention(factor: float) -> float:
    return 0.1 * math.log(factor) + 1.0
