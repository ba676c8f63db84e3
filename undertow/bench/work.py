"""Operations and bytes that an operator cannot do without, and the least time that follows from them.

Bytes count each input read once and each output written once. Operations of attention have two conventions: *exact*
counts the keys that a query sees, *nominal* every slot of its window and its selection, also where they are empty, as
published tables do. Backward is 2.5 times forward: five products where forward has two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from undertow.bench.ceilings import Ceilings

BACKWARD = 2.5


@dataclass(frozen=True)
class Work:
    """`bytes` moved at least, and operations in both conventions; 0 operations for what has none worth counting."""

    bytes: int
    exact: float = 0.0
    nominal: float = 0.0

    def floor(self, ceilings: Ceilings) -> tuple[float, str]:
        """Least milliseconds at the measured rates, by exact operations, and what bounds it: `memory` or `math`."""
        memory, math = 1e3 * self.bytes / ceilings.copy, 1e3 * self.exact / ceilings.matmul
        return (memory, "memory") if memory >= math else (math, "math")


def window_pairs(lengths: Sequence[int], window: int) -> int:
    """Pairs of query and key in the sliding window, itself included, over documents of these lengths."""
    inside = [min(length, window) for length in lengths]
    return sum(i * n - i * (i - 1) // 2 for i, n in zip(inside, lengths, strict=True))


def entry_pairs(lengths: Sequence[int], ratio: int, keep: int | None = None) -> int:
    """Pairs of query and visible entry, at most `keep` a query: `sum over t of min((t + 1) // ratio, keep)`."""
    total = 0
    for length in lengths:
        entries = length // ratio if keep is None else min(length // ratio, keep)
        total += ratio * entries * (entries - 1) // 2 + entries * (length - ratio * entries + 1)
    return total


def slots(lengths: Sequence[int], window: int, ratio: int, keep: int | None = None) -> int:
    """Nominal pairs: every query with its whole window and as many entries as any query of its document can have."""
    entries = [length // ratio if ratio else 0 for length in lengths]
    taken = [e if keep is None else min(e, keep) for e in entries]
    return sum(length * (window + e) for length, e in zip(lengths, taken, strict=True))
