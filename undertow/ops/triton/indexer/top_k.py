"""The k best of each row of scores, exact to the tie: the lowest entries first among equal scores.

Scores are compared as integers of the same order. The k-th largest is found by halving the interval between the least
and the largest, which ends as soon as exactly k lie above its lower end; what is chosen is then put in order of its
number by a running count.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
# The language of kernels has types of its own.
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from undertow.ops.triton.indexer.tiles import tiles

_COUNTED = 1 << 15
"""Columns of the widest row that is held: `_search` counts them in 16 bits."""
_PART = 4096
"""Columns of a longer row that are read at a time."""
_LEAST = tl.constexpr(-0x80000000)
_MOST = tl.constexpr(0x7FFFFFFF)
_NAN = tl.constexpr(0x7FFFFFFE)


@triton.jit
def _ordered(x, seen):
    """int32 in the order of float32 `x`: NaN above all, zeros of both signs equal, the least for -inf or not `seen`."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & _MOST)
    key = tl.where(x != x, _NAN, key)
    return tl.where(seen & (x != float("-inf")), key, _LEAST)


@triton.jit
def _between(low, high):
    """The mean of two int32, rounded down, without their sum."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _finish(out, total, first, K: tl.constexpr, PLACES: tl.constexpr):
    """Places of a row from `first` on: their own number below `total`, then -1."""
    for s in range(0, K, PLACES):
        place = s + tl.arange(0, PLACES)
        tl.store(out + place, tl.where(place < total, place, -1).to(tl.int64), (place >= first) & (place < K))


@triton.jit
def _search(key, found, out, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Numbers of the K largest of `key [COLUMNS]`, ascending; `found` are above the least."""
    n = tl.arange(0, COLUMNS)
    # Of an interval [bottom, top): K or more are not below bottom, fewer than K not below top.
    bottom = tl.min(tl.where(key > _LEAST, key, _MOST), 0)
    top = tl.max(key, 0) + 1
    bottom = tl.where(found > K, bottom, _LEAST)
    count = found
    middle = _between(bottom, top)
    while (count > K) & (middle > bottom):
        above = tl.sum((key >= middle).to(tl.int32), 0)
        up = above >= K
        bottom = tl.where(up, middle, bottom)
        top = tl.where(up, top, middle)
        count = tl.where(up, above, count)
        middle = _between(bottom, top)
    above = key > bottom
    equal = (key == bottom) & (key > _LEAST)
    # Two counts in one word, of 16 bits each: of those above, and of equal ones in the upper half.
    order = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
    wanted = K - tl.sum(above.to(tl.int32), 0)
    ties = (order >> 16) & 0xFFFF
    place = (order & 0xFFFF) + tl.minimum(ties, wanted) - 1
    tl.store(out + place, n.to(tl.int64), above | (equal & (ties <= wanted)))


@triton.jit
def indexer_choose(scores, low, high, out, start, width, K: tl.constexpr, COLUMNS: tl.constexpr, PLACES: tl.constexpr):
    """One row, held in registers: numbers int64 of its K best, ascending, then -1."""
    row = start + tl.program_id(0)
    visible = tl.load(high + row) - tl.load(low + row)
    out += row.to(tl.int64) * K
    n = tl.arange(0, COLUMNS)
    x = tl.load(scores + tl.program_id(0).to(tl.int64) * width + n, n < visible, other=float("-inf"))
    key = _ordered(x, n < visible)
    found = tl.sum((key > _LEAST).to(tl.int32), 0)
    if visible <= tl.minimum(found, K):
        # All that is visible is kept.
        _finish(out, visible, 0, K, PLACES)
    else:
        _search(key, found, out, K, COLUMNS)
        if found < K:
            _finish(out, 0, found, K, PLACES)


@triton.jit
def _count(scores, visible, bound, COLUMNS: tl.constexpr):
    """How many of a long row are not below `bound`."""
    total = tl.full((), 0, tl.int32)
    for c in range(0, visible, COLUMNS):
        n = c + tl.arange(0, COLUMNS)
        key = _ordered(tl.load(scores + n, n < visible, other=float("-inf")), n < visible)
        total += tl.sum((key >= bound).to(tl.int32), 0)
    return total


@triton.jit
def indexer_choose_long(
    scores, low, high, out, start, width, K: tl.constexpr, COLUMNS: tl.constexpr, PLACES: tl.constexpr
):
    """As `indexer_choose`, for a row of any length."""
    row = start + tl.program_id(0)
    visible = tl.load(high + row) - tl.load(low + row)
    out += row.to(tl.int64) * K
    scores += tl.program_id(0).to(tl.int64) * width
    found = _count(scores, visible, _LEAST + 1, COLUMNS)
    bottom = tl.full((), _LEAST + 1, tl.int32)
    top = tl.full((), _MOST, tl.int32)
    bottom = tl.where(found > K, bottom, _LEAST)
    count = found
    middle = _between(bottom, top)
    while (count > K) & (middle > bottom):
        above = _count(scores, visible, middle, COLUMNS)
        up = above >= K
        bottom = tl.where(up, middle, bottom)
        top = tl.where(up, top, middle)
        count = tl.where(up, above, count)
        middle = _between(bottom, top)
    wanted = K - _count(scores, visible, bottom + 1, COLUMNS)
    before = tl.full((), 0, tl.int32)
    before_ties = tl.full((), 0, tl.int32)
    for c in range(0, visible, COLUMNS):
        n = c + tl.arange(0, COLUMNS)
        key = _ordered(tl.load(scores + n, n < visible, other=float("-inf")), n < visible)
        above = key > bottom
        equal = (key == bottom) & (key > _LEAST)
        order = before + tl.cumsum(above.to(tl.int32), 0)
        ties = before_ties + tl.cumsum(equal.to(tl.int32), 0)
        place = order + tl.minimum(ties, wanted) - 1
        tl.store(out + place, n.to(tl.int64), above | (equal & (ties <= wanted)))
        before += tl.sum(above.to(tl.int32), 0)
        before_ties += tl.sum(equal.to(tl.int32), 0)
    _finish(out, 0, found, K, PLACES)


def choose_best(scores: Tensor, low: Tensor, high: Tensor, start: int, out: Tensor) -> None:
    """Rows `start` on of `out [T, k]` int64: the k best of each row of `scores [tokens, width]` float32, ascending by
    number, -1 where fewer are visible.

    A row sees its first `high - low` columns (int32 `[T]`). -inf is never chosen; NaN is the largest, as in torch.
    """
    tokens, width = scores.shape
    if tokens == 0:
        return
    tile = tiles(scores.device, "choose")
    kernel, columns = indexer_choose, max(triton.next_power_of_2(width), 32)
    if columns > min(tile["HELD"], _COUNTED):
        # Too wide for the registers: read again for every step, some 30 times.
        kernel, columns = indexer_choose_long, _PART
    k = out.shape[1]
    kernel[(tokens,)](
        scores, low, high, out, start, width,
        K=k, COLUMNS=columns, PLACES=min(triton.next_power_of_2(k), 1024), num_warps=max(columns // tile["WARP"], 1),
    )  # fmt: skip
