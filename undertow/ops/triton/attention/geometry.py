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

LARGEST_WINDOW = 128
"""Tokens of the largest window whose tile the kernels hold."""
SPILL = 3 << 29
"""Bytes that P and dS of a dense slab's entries take at most, 1.5 GiB, unless those of one block take more: of 64 heads
they do beyond 393,216 columns."""

_SLAB = 4096 * 64
"""Rows (token x head) of a slab; four times as many where all of a call is near, for then least is kept of a token."""
_LEAST_GATHERED = 16
"""Heads from which on the gather form serves: the rows of its products are the heads of one token, 16 at least."""
_DENSE = 1.75
"""Up to so many times the entries that a query keeps may it see, on average over a slab, for the dense form to be the
faster one; measured on an H200, where the two meet near 6,000 tokens at 512 kept of one in four."""

Form = Literal["near", "dense", "gather"]


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
    return segments.once(("sight", ratio), lambda: _sight(segments, ratio))


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

    Near without a selection, while no block sees more than `NEAR` entries; else dense, and with a selection only while
    a query sees at most 1.75 times the entries it keeps, on average over the slab.
    """
    return segments.once(
        ("slabs", ratio, heads, keep), lambda: _slabs(sight(segments, ratio), segments.tokens, heads, keep)
    )


def _slabs(view: Sight, tokens: int, heads: int, keep: int | None) -> tuple[Slab, ...]:
    low, high = view.seen
    if tokens == 0:
        return ()
    block = torch.arange(0, tokens, BLOCK)
    together = high[(block + BLOCK - 1).clamp(max=tokens - 1)] - low[block]
    if keep is None and int(together.max()) <= NEAR:
        return tuple(Slab(a, b, "near") for a, b in _cuts(0, tokens, 4 * _SLAB // heads))
    made = []
    for start, stop in _cuts(0, tokens, _SLAB // heads):
        if keep is None and int(together[start // BLOCK : -(-stop // BLOCK)].max()) <= NEAR:
            made.append(Slab(start, stop, "near"))
            continue
        seen = (high - low)[start:stop].float()
        dense = keep is None or heads < _LEAST_GATHERED or seen.mean() <= _DENSE * seen.clamp(max=keep).mean()
        if not dense:
            made.append(Slab(start, stop, "gather", *_columns(view, start, stop)))
            continue
        # P and dS in bfloat16, 4 bytes for each row and column.
        step, row = stop - start, 4 * _columns(view, start, stop)[1]
        while step > BLOCK and step * heads * row > SPILL:
            unit = COLUMNS if step > COLUMNS else BLOCK
            step = max(step // 2 // unit, 1) * unit
        made += [Slab(a, b, "dense", *_columns(view, a, b)) for a, b in _cuts(start, stop, step)]
    return tuple(made)


def _columns(view: Sight, start: int, stop: int) -> tuple[int, int]:
    """First column of these tokens and number of columns."""
    low, high = view.seen
    first = int(low[start]) // COLUMNS * COLUMNS
    return first, -(-(int(high[stop - 1]) - first) // COLUMNS) * COLUMNS


def _cuts(start: int, stop: int, step: int) -> list[tuple[int, int]]:
    """From `start` to `stop` in steps."""
    return list(pairwise([*range(start, stop, step), stop]))
