"""The order of documents in an epoch: a function of seed and epoch that no release of Python or NumPy can change."""

from __future__ import annotations

import numpy as np

_STEP = np.uint64(0x9E3779B97F4A7C15)


def epoch_order(documents: int, seed: int, epoch: int) -> np.ndarray:
    """The numbers 0 to `documents` - 1 [N] int64 in the order of `epoch`; `seed` is taken modulo 2^64.

    Numbers are sorted by a hash of their own (splitmix64, Steele, Lea and Flood 2014), which maps no two to one value.
    """
    start = np.array([seed % 2**64], dtype=np.uint64)
    start = _mix(_mix(start + _STEP) + np.uint64(epoch))
    return np.argsort(_mix(start + _STEP * np.arange(documents, dtype=np.uint64)), kind="stable")


def _mix(values: np.ndarray) -> np.ndarray:
    # Arithmetic of unsigned arrays wraps without a warning; that of scalars would warn.
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
