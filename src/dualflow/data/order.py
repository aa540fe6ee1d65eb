"""Shuffled orders that depend on (seed, epoch) alone. No torch here."""

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1


def epoch_order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of 0 .. count − 1: its items sorted by a hash of (seed, epoch, item).

    The hash is SplitMix64's mixing function (Steele, Lea and Flood 2014), plain 64-bit arithmetic,
    so that the order of a saved run is the same under every version of every library.
    """
    start = _mix(_mix(seed & _MASK) ^ (epoch & _MASK))
    keys = np.arange(count, dtype=np.uint64) * np.uint64(_GAMMA) + np.uint64(start)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(keys ^ (keys >> np.uint64(31)), kind="stable")


_GAMMA = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
