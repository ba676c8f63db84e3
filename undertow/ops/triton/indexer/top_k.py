"""The k best of each row of scores, exact to the tie: the lowest entries first among equal scores.

Scores are compared as integers of the same order. The k-th largest is found by cutting an interval in thirds, until
exactly k are not below its lower end. That end begins at the least of the largest of k or more parts of the row, for as
many are not below it. What is chosen is then put in order of its number by a running count.
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
def _cuts(bottom, top):
    """Two int32 that cut the interval [bottom, top), of two numbers at least, in thirds; the first is the lower one."""
    third = (top - bottom).to(tl.uint32, bitcast=True) // 3
    third = tl.maximum(third, 1).to(tl.int32, bitcast=True)
    return bottom + third, top - third


@triton.jit
def _narrow(bottom, top, count, first, second, above_first, above_second, K: tl.constexpr):
    """The third that holds the K-th largest, and how many are not below it, if so many are not below the cuts."""
    one, two = above_first >= K, above_second >= K
    count = tl.where(two, above_second, tl.where(one, above_first, count))
    return tl.where(two, second, tl.where(one, first, bottom)), tl.where(two, top, tl.where(one, second, first)), count


@triton.jit
def _finish(out, total, first, K: tl.constexpr, PLACES: tl.constexpr):
    """Places of a row from `first` on: their own number below `total`, then -1."""
    for s in range(0, K, PLACES):
        place = s + tl.arange(0, PLACES)
        tl.store(out + place, tl.where(place < total, place, -1).to(tl.int64), (place >= first) & (place < K))


@triton.jit
def _running(count, COLUMNS: tl.constexpr):
    """Running sums of `count [COLUMNS]`. Those of many warps at once are dear: they are made within runs of 128, which
    a warp holds, and the sums of all runs before are added."""
    if COLUMNS <= 1024:
        sums = tl.cumsum(count, 0)
    else:
        RUNS: tl.constexpr = COLUMNS // 128
        run = tl.arange(0, RUNS)
        inside = tl.reshape(count, [RUNS, 128])
        before = tl.sum(tl.where(run[None, :] < run[:, None], tl.sum(inside, 1)[None, :], 0), 1)
        sums = tl.reshape(tl.cumsum(inside, 1) + before[:, None], [COLUMNS])
    return sums


@triton.jit
def _search(key, bottom, top, count, out, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Numbers of the K largest of `key [COLUMNS]`, ascending, or of the `count` largest, which are not below `bottom`,
    if that is fewer."""
    # K or more are not below bottom, fewer than K not below top.
    while (count > K) & (bottom + 1 < top):
        first, second = _cuts(bottom, top)
        # Two counts in one word, of 16 bits each.
        pair = tl.sum((key >= first).to(tl.int32) + ((key >= second).to(tl.int32) << 16), 0)
        bottom, top, count = _narrow(bottom, top, count, first, second, pair & 0xFFFF, (pair >> 16) & 0xFFFF, K)
    n = tl.arange(0, COLUMNS)
    if count > K:
        # Of the equal ones only the first are wanted.
        equal, wanted = key == bottom, K - tl.sum((key > bottom).to(tl.int32), 0)
        key = tl.where(equal & (_running(equal.to(tl.int32), COLUMNS) > wanted), bottom - 1, key)
    chosen = key >= bottom
    place = _running(chosen.to(tl.int32), COLUMNS) - 1
    tl.store(out + place, n.to(tl.int64), chosen)


@triton.jit
def indexer_choose(
    scores, low, high, out, start, width,
    K: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One row, held in registers: numbers int64 of its K best, ascending, then -1. It is taken for PARTS parts, of
    which each has every PARTS-th column: K or more of them, unless there are fewer columns."""
    row = start + tl.program_id(0)
    visible = tl.load(high + row) - tl.load(low + row)
    out += row.to(tl.int64) * K
    n = tl.arange(0, COLUMNS)
    # Whole units of 16 bytes, which one instruction reads.
    read = (n < (visible + 3) // 4 * 4) & (n < width)
    x = tl.load(scores + tl.program_id(0).to(tl.int64) * width + n, read, other=float("-inf"))
    key = _ordered(x, n < visible)
    largest = tl.max(tl.reshape(key, [COLUMNS // PARTS, PARTS]), 0)
    bottom, found = tl.min(largest, 0), visible
    if (visible <= K) | (bottom == _LEAST):
        found = tl.sum((key > _LEAST).to(tl.int32), 0)
        bottom = tl.where(found > K, tl.min(tl.where(key > _LEAST, key, _MOST), 0), _LEAST + 1)
    if visible <= tl.minimum(found, K):
        # All that is visible is kept.
        _finish(out, visible, 0, K, PLACES)
    else:
        _search(key, bottom, tl.max(largest, 0) + 1, found, out, K, COLUMNS)
        if found < K:
            _finish(out, 0, found, K, PLACES)


@triton.jit
def _part(scores, visible, c, COLUMNS: tl.constexpr):
    """Keys of a part of a long row, from column `c` on."""
    n = c + tl.arange(0, COLUMNS)
    return _ordered(tl.load(scores + n, n < visible, other=float("-inf")), n < visible)


@triton.jit
def _count(scores, visible, first, second, COLUMNS: tl.constexpr):
    """How many of a long row are not below each of two bounds."""
    above_first = tl.full((), 0, tl.int32)
    above_second = tl.full((), 0, tl.int32)
    for c in range(0, visible, COLUMNS):
        key = _part(scores, visible, c, COLUMNS)
        pair = tl.sum((key >= first).to(tl.int32) + ((key >= second).to(tl.int32) << 16), 0)
        above_first += pair & 0xFFFF
        above_second += pair >> 16
    return above_first, above_second


@triton.jit
def indexer_choose_long(
    scores, low, high, out, start, width,
    K: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """As `indexer_choose`, for a row of any length."""
    row = start + tl.program_id(0)
    visible = tl.load(high + row) - tl.load(low + row)
    out += row.to(tl.int64) * K
    scores += tl.program_id(0).to(tl.int64) * width
    found = tl.full((), 0, tl.int32)
    largest = tl.full((COLUMNS,), _LEAST, tl.int32)
    for c in range(0, visible, COLUMNS):
        key = _part(scores, visible, c, COLUMNS)
        found += tl.sum((key > _LEAST).to(tl.int32), 0)
        largest = tl.maximum(largest, key)
    top = tl.max(largest, 0) + 1
    bottom = tl.full((), _LEAST + 1, tl.int32)
    if PARTS >= K:
        largest = tl.max(tl.reshape(largest, [COLUMNS // PARTS, PARTS]), 0)
        bottom = tl.where(found > K, tl.maximum(tl.min(largest, 0), bottom), bottom)
    count = found
    while (count > K) & (bottom + 1 < top):
        first, second = _cuts(bottom, top)
        above_first, above_second = _count(scores, visible, first, second, COLUMNS)
        bottom, top, count = _narrow(bottom, top, count, first, second, above_first, above_second, K)
    wanted = tl.full((), K, tl.int32)
    if count > K:
        # Of the equal ones only the first are wanted.
        _same, above = _count(scores, visible, bottom, bottom + 1, COLUMNS)
        wanted = K - above
    before = tl.full((), 0, tl.int32)
    before_ties = tl.full((), 0, tl.int32)
    for c in range(0, visible, COLUMNS):
        key = _part(scores, visible, c, COLUMNS)
        equal = (key == bottom).to(tl.int32)
        ties = before_ties + tl.cumsum(equal, 0)
        chosen = (key > bottom) | ((key == bottom) & (ties <= wanted))
        place = before + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(out + place, (c + tl.arange(0, COLUMNS)).to(tl.int64), chosen)
        before += tl.sum(chosen.to(tl.int32), 0)
        before_ties += tl.sum(equal, 0)
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
        # Too wide for the registers: read again for every step, some ten times.
        kernel, columns = indexer_choose_long, _PART
    k = out.shape[1]
    kernel[(tokens,)](
        scores, low, high, out, start, width,
        K=k, COLUMNS=columns, PARTS=min(triton.next_power_of_2(k), columns),
        PLACES=min(triton.next_power_of_2(k), 1024), num_warps=max(columns // tile["WARP"], 1),
    )  # fmt: skip
