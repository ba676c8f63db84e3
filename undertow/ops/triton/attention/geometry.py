"""Who sees what in one call of attention, and the slabs of tokens in which the kernels go through it.

Documents lie end to end in one axis `T`, their compressed entries end to end in one axis `N`. A token sees window keys
from its document's first row on, and the entries `low <= n < high`; both bounds only grow along `T`, so that what a
run of tokens sees together is one interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from undertow.ops.segments import Segments

BLOCK = 16
"""Tokens that share the tiles of their window: the rows before the block, and its own."""
NEAR = 32
"""Entries that fit beside the window in one tile."""
COLUMNS = 128
"""Entries a program of the dense form takes; a slab's first column is a multiple of it."""

_SPILL = 3 << 29
_LEAST_GATHERED = 16
_HEADS_TOKENS = 4096 * 64
_DENSE = 1.75

Form = Literal["near", "dense", "gather"]


LARGEST_WINDOW = 128
"""Tokens of the largest window whose tile the kernels hold."""


@dataclass(frozen=True)
class Sight:
    """What each token sees, int32 `[T]`: `begin` its document's first row, `low` and `high` its entries' bounds.

    `seen` are `low` and `high` on the host, int64 `[2, T]`.
    """

    begin: Tensor
    low: Tensor
    high: Tensor
    seen: Tensor
    entries: int


@dataclass(frozen=True)
class Slab:
    """Tokens `start` to `stop` in one form.

    `near`: all the entries that a block sees fit one tile beside the window (none in SWA). `dense`: every visible entry
    is multiplied, those not chosen are masked. `gather`: only the chosen ones. `column` is the first of `columns`
    entries that the slab sees, both multiples of `COLUMNS` (0 in the near form).
    """

    start: int
    stop: int
    form: Form
    column: int = 0
    columns: int = 0

    @property
    def tokens(self) -> int:
        return self.stop - self.start


def old_rows(window_size: int) -> int:
    """Rows before a block that its tile holds: a power of two, so that the block's first token sees its window."""
    return max(1 << max(window_size - 2, 0).bit_length(), BLOCK)


def sight(segments: Segments, ratio: int) -> Sight:
    """Of a call without a past; `ratio` tokens make an entry, 0 for none. Made once for all layers of a call."""
    key = ("sight", ratio)
    if key not in segments._memo:
        segments._memo[key] = _sight(segments, ratio)
    return segments._memo[key]


def _sight(segments: Segments, ratio: int) -> Sight:
    new = torch.tensor(segments.new, dtype=torch.int64)
    made = new // ratio if ratio else torch.zeros_like(new)
    begin = torch.repeat_interleave(new.cumsum(0) - new, new)
    low = torch.repeat_interleave(made.cumsum(0) - made, new)
    position = torch.arange(segments.tokens) - begin
    high = low + (position + 1) // ratio if ratio else low
    tables = torch.stack((begin, low, high)).to(torch.int32).to(segments.device, non_blocking=True)
    return Sight(tables[0], tables[1], tables[2], torch.stack((low, high)), int(made.sum()))


def slabs(segments: Segments, ratio: int, heads: int, keep: int | None) -> tuple[Slab, ...]:
    """The slabs of a call, in order. `keep` is the number of entries a query selects at most, None if it takes all.

    The rule for a selection: dense while a query sees at most 1.75 times the entries it keeps, on average over the
    slab; measured on an H200, the two meet near 6,000 tokens at 512 kept of one in four.
    """
    key = ("slabs", ratio, heads, keep)
    if key not in segments._memo:
        segments._memo[key] = _slabs(sight(segments, ratio), segments.tokens, heads, keep)
    return segments._memo[key]


def _slabs(view: Sight, tokens: int, heads: int, keep: int | None) -> tuple[Slab, ...]:
    low, high = view.seen
    if tokens == 0:
        return ()
    block = torch.arange(0, tokens, BLOCK)
    together = high[(block + BLOCK - 1).clamp(max=tokens - 1)] - low[block]
    if keep is None and int(together.max()) <= NEAR:
        step = _multiple(4 * _HEADS_TOKENS // heads)
        return tuple(Slab(a, b, "near") for a, b in _steps(0, tokens, step))
    found = []
    for start, stop in _steps(0, tokens, _multiple(_HEADS_TOKENS // heads)):
        if keep is None and int(together[start // BLOCK : -(-stop // BLOCK)].max()) <= NEAR:
            found.append(Slab(start, stop, "near"))
            continue
        seen = (high - low)[start:stop].float()
        # A product takes 16 rows at least, and the gather form's are the heads of one token.
        dense = keep is None or heads < _LEAST_GATHERED or seen.mean() <= _DENSE * seen.clamp(max=keep).mean()
        if not dense:
            found.append(Slab(start, stop, "gather", *_span(view, start, stop)))
            continue
        # P and dS of a token in bfloat16 for every column, halved until a slab of them is small.
        step = stop - start
        while step > COLUMNS and step * heads * _span(view, start, stop)[1] * 4 > _SPILL:
            step = _multiple(step // 2)
        found += [Slab(a, b, "dense", *_span(view, a, b)) for a, b in _steps(start, stop, step)]
    return tuple(found)


def _span(view: Sight, start: int, stop: int) -> tuple[int, int]:
    low, high = view.seen
    first = int(low[start]) // COLUMNS * COLUMNS
    return first, -(-(int(high[stop - 1]) - first) // COLUMNS) * COLUMNS


def _multiple(tokens: int) -> int:
    return max(tokens // COLUMNS, 1) * COLUMNS


def _steps(start: int, stop: int, step: int) -> list[tuple[int, int]]:
    return list(pairwise([*range(start, stop, step), stop]))
