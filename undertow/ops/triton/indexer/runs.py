"""Runs of tokens whose scores exist together, as a matrix `[tokens, width]`.

Column `c` of a token's row is entry `c` of its own document, so that documents packed into one call share no width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from undertow.ops.segments import Segments
from undertow.ops.triton.attention.geometry import Sight, sight

SCORES = 1 << 25
"""Numbers of one matrix: 128 MiB of float32, unless the least run of tokens needs more."""

_LEAST = 64
"""Tokens of the shortest run; the tokens of a run are a multiple of it."""
_MOST = 1 << 15
"""Tokens of the longest run: blocks of them, of one token at least, lie along a grid's second axis, which ends at
65,535."""
_ALIGNED = 16
"""Columns that divide a run's width: of such a one Triton knows that every row begins at a multiple of 16 bytes."""


@dataclass(frozen=True)
class Run:
    """Tokens `start` to `stop`; `width` columns hold all that any of them sees."""

    start: int
    stop: int
    width: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


def runs(segments: Segments, ratio: int, scores: int = SCORES) -> tuple[Run, ...]:
    """The runs of a call, in order; `scores` bounds the numbers of each. Tokens of a run may see nothing at all."""
    return segments.once(
        ("indexer runs", ratio, scores), lambda: _runs(sight(segments, ratio), segments.tokens, scores)
    )


def _runs(view: Sight, tokens: int, scores: int) -> tuple[Run, ...]:
    low, high = view.seen
    seen, made, start = high - low, [], 0
    while start < tokens:
        size = min(tokens - start, _MOST)
        while True:
            width = -(-max(int(seen[start : start + size].max()), 1) // _ALIGNED) * _ALIGNED
            if size <= _LEAST or size * width <= scores:
                break
            size = -(-size // 2 // _LEAST) * _LEAST
        made.append(Run(start, start + size, width))
        start += size
    return tuple(made)


def equal_runs(tokens: int, width: int, scores: int) -> tuple[Run, ...]:
    """Runs of so many tokens in all, each of at most `scores` numbers or one token, and none too long for a grid."""
    size = min(max(scores // max(width, 1), 1), _MOST)
    return tuple(Run(start, min(start + size, tokens), width) for start in range(0, tokens, size))


def together(segments: Segments, ratio: int, run: Run, block: int) -> int:
    """The most entries that any `block` consecutive tokens of a run see together, the first at a multiple of `block`
    from its start."""

    def make() -> int:
        low, high = sight(segments, ratio).seen
        first = torch.arange(run.start, run.stop, block)
        last = (first + block - 1).clamp(max=run.stop - 1)
        return int((high[last] - low[first]).max()) if len(first) else 0

    return segments.once(("indexer together", ratio, run, block), make)
