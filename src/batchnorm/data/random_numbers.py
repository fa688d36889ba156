"""Random numbers as a function of a seed and a position: there is no generator state to save."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Weyl increment and multipliers of splitmix64 (Steele, Lea & Flood 2014).
_STEP, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def seed_at(seed: int, *position: int) -> int:
    """Return a 63-bit seed that depends only on the run's seed and a position, such as (epoch, step).

    Args:
        seed: the run's seed.
        position: any number of integers.

    >>> import torch
    >>> generator = torch.Generator().manual_seed(seed_at(0, 3, 17))

    Beyond the paper: resuming a run exactly.
    """
    key = seed & _MASK
    for part in position:
        key = _mix_scalar(key * _MIX_1 + int(part) + _STEP)
    return key >> 1


def hashes(key: int, index: NDArray[np.int64], draws: int) -> NDArray[np.uint64]:
    """Return ``draws`` independent 64-bit integers for each index, of shape (len(index), draws)."""
    counter = index.astype(np.uint64)[:, None] * np.uint64(draws) + np.arange(1, draws + 1, dtype=np.uint64)
    return _mix(_mix(counter * np.uint64(_STEP)) ^ np.uint64(_mix_scalar(key)))


def uniforms(key: int, index: NDArray[np.int64], draws: int) -> NDArray[np.float64]:
    """Return ``draws`` independent numbers in [0, 1) for each index, of shape (len(index), draws)."""
    return (hashes(key, index, draws) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(key: int, n: int) -> NDArray[np.int64]:
    """Return a random permutation of 0 to n - 1; unlike those of numpy's Generator, it is the same in all versions."""
    return np.argsort(hashes(key, np.arange(n), 1)[:, 0], kind="stable")


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    return z ^ (z >> np.uint64(31))


def _mix_scalar(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)
