"""Backward of the entries in the dense form: every column of a slab is multiplied, what a token may not see is masked.

A tile of `BK` entries is written for the tokens of a group (`ROWS` rows) if one of them sees into it, and only such
tiles are read.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from undertow.ops.segments import Segments
from undertow.ops.triton.attention.geometry import COLUMNS, Sight, Slab
from undertow.ops.triton.attention.rounding import flagged, keys_mended, queries_mended
from undertow.ops.triton.attention.tiles import ROWS
from undertow.ops.triton.attention.window_forward import LOG2E

_CHUNK = 144 * 64
"""Rows (token x head) that a program of `pool_keys` sums at most: its programs then fill whole waves on an H200."""
GROUPS = triton.next_power_of_2(_CHUNK // ROWS)
"""A bound on the groups of rows in a piece of the plan."""


@triton.jit
def pool_scores(
    q, do, keys, p, ds, bits, low, high, lse, delta, sums, stride, start, call_tokens, column, words, scale,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
    CHOSEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """M rows x BK entries: P, dS (zero where the entry is not seen or, CHOSEN, its bit is off), sums of dS / scale."""
    k0 = column + tl.program_id(0) * BK
    r0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * M
    group = r0 // ROWS * ROWS
    last = tl.minimum(start + (group + ROWS - 1) // H, call_tokens - 1)
    if (k0 < tl.load(high + last)) & (k0 + BK > tl.load(low + start + group // H)):
        row = start * H + r0
        m = tl.arange(0, M)
        e = k0 + tl.arange(0, BK)
        inside = start + (r0 + m) // H < call_tokens
        # Masks are rows of one vector a token; bits are asked for before the products, and come while those run.
        TOKENS: tl.constexpr = M // H if M > H else 1
        first = r0 // H
        if CHOSEN:
            at = bits + first.to(tl.int64) * words + (e - column) // 32
            on = ((tl.load(at, start + first + e * 0 < call_tokens, other=0) >> (e % 32)) & 1 != 0)[None, :]
            for i in tl.static_range(1, TOKENS):
                word = tl.load(at + i * words, start + first + i + e * 0 < call_tokens, other=0)
                on = tl.where((m // H < i)[:, None], on, ((word >> (e % 32)) & 1 != 0)[None, :])
        s = tl.zeros((M, BK), tl.float32)
        d = tl.zeros((M, BK), tl.float32)
        for c in tl.range(0, D, BD, num_stages=STAGES):
            a = q.load([row, c])
            g = do.load([row, c])
            k_tile = keys.load([k0, c])
            s = tl.dot(a, k_tile.T, s)
            d = tl.dot(g, k_tile.T, d)
        if not CHOSEN:
            if TOKENS == 1:
                token = first + tl.zeros((1,), tl.int32)
            else:
                token = first + m // H
            held = start + token < call_tokens
            lo = tl.load(low + start + token, held, other=0)
            hi = tl.load(high + start + token, held, other=0)
            on = (e[None, :] >= lo[:, None]) & (e[None, :] < hi[:, None])
        row_lse = tl.load(lse + row + m, inside, other=0.0) * LOG2E
        row_delta = tl.load(delta + row + m, inside, other=0.0)
        weight = tl.where(on, tl.exp2(s * (scale * LOG2E) - row_lse[:, None]), 0.0)
        p.store([r0, k0 - column], weight.to(tl.bfloat16))
        d = weight * (d - row_delta[:, None])
        tl.store(sums + tl.program_id(0) * stride + r0 + m, tl.sum(d, 1))
        ds.store([r0, k0 - column], (d * scale).to(tl.bfloat16))


@triton.jit
def pool_queries(
    ds_old, ds_new, ds, old, new, keys, dq, o, low, high, rests, sizes, start, call_tokens, column, scale,
    H: tl.constexpr, D: tl.constexpr, OLD: tl.constexpr, NEW: tl.constexpr, ROWS: tl.constexpr,
    BK: tl.constexpr, BO: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A group of rows, BN columns: dq = dS K over the window's fixed columns and every entry that its tokens see."""
    c = tl.program_id(0) * BN
    r0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    t0 = start + r0 // (NEW * H) * NEW
    lo = tl.load(low + start + r0 // H) // BK * BK
    hi = tl.load(high + tl.minimum(start + (r0 + ROWS - 1) // H, call_tokens - 1))
    acc = tl.zeros((ROWS, BN), tl.float32)
    for k in tl.range(lo, hi, BK, num_stages=STAGES):
        acc = tl.dot(ds.load([r0, k - column]), keys.load([k, c]), acc)
    for k in tl.range(0, OLD, BO, num_stages=STAGES):
        acc = tl.dot(ds_old.load([r0, k]), old.load([t0 - OLD + k, c]), acc)
    acc = tl.dot(ds_new.load([r0, 0]), new.load([t0, c]), acc)
    row = start * H + r0
    inside = row + tl.arange(0, ROWS) < call_tokens * H
    acc = queries_mended(acc, o, row, inside, c, rests, sizes, scale, ROWS, D, BN)
    dq.store([row, c], acc.to(tl.bfloat16))


@triton.jit
def pool_keys(
    q, do, p, ds, parts, plan, excess, flags, start, column,
    H: tl.constexpr, D: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    BN: tl.constexpr, BH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BK entries x BN columns over the tokens of one piece of the plan, at most GROUPS groups of rows: P^T do + dS^T q,
    to its place in `parts`."""
    pid = tl.program_id(0)
    piece = pid // (D // BN)
    k0 = tl.load(plan + piece * 3) - column
    lo = (tl.load(plan + piece * 3 + 1) - start) * H
    hi = (tl.load(plan + piece * 3 + 2) - start) * H
    c = pid % (D // BN) * BN
    # Transposed: otherwise Triton 3.6 does not let the result reuse the loop's shared memory.
    acc = tl.zeros((BN, BK), tl.float32)
    for r in tl.range(lo, hi, BH, num_stages=STAGES):
        acc = tl.dot(do.load([start * H + r, c]).T, p.load([r, k0]), acc)
        acc = tl.dot(q.load([start * H + r, c]).T, ds.load([r, k0]), acc)
    if flagged(flags, lo, hi, ROWS, GROUPS):
        for r in tl.range(lo, hi, BH, num_stages=1):
            if tl.load(flags + r // ROWS) != 0:
                acc = keys_mended(acc, q, p, excess, r, start * H + r, c, k0, BH)
    at = parts + piece.to(tl.int64) * (BK * D)
    tl.store(at + tl.arange(0, BK)[:, None] * D + (c + tl.arange(0, BN))[None, :], acc.T)


@dataclass(frozen=True)
class Plan:
    """The pieces of `pool_keys` in a slab: int32 `[pieces, 3]` of first entry, first token and end token, by tokens, so
    that programs which share queries run together. `order` are the pieces of each tile of entries, tile after tile and
    each in the order of tokens; `offsets` where each tile's begin, int32 `[tiles + 1]`.
    """

    pieces: Tensor
    order: Tensor
    offsets: Tensor


def plan(view: Sight, slab: Slab, segments: Segments, ratio: int, heads: int) -> Plan:
    """Made once for all layers of a call."""
    return segments.once(("pool pieces", ratio, heads, slab), lambda: _plan(view, slab, heads))


def _plan(view: Sight, slab: Slab, heads: int) -> Plan:
    low, high = view.seen[:, slab.start : slab.stop].tolist()
    unit = max(ROWS // heads, 1)
    step = max(_CHUNK // heads // unit, 1) * unit
    pieces, of_tile = [], [[] for _ in range(slab.columns // COLUMNS)]
    for a in range(0, slab.tokens, step):
        b = min(a + step, slab.tokens)
        for tile, mine in enumerate(of_tile):
            k = slab.column + tile * COLUMNS
            # Tokens that see into the tile: `high > k` and `low < k + COLUMNS`.
            first, end = bisect_right(high, k, a, b), bisect_left(low, k + COLUMNS, a, b)
            if first < end:
                mine.append(len(pieces))
                first, end = first // unit * unit, -(-end // unit) * unit
                pieces.append((k, slab.start + first, slab.start + end))
    counts = [0] + [len(mine) for mine in of_tile]
    tables = (
        torch.tensor(pieces, dtype=torch.int32).view(-1, 3),
        torch.tensor([piece for mine in of_tile for piece in mine], dtype=torch.int32),
        torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32),
    )
    return Plan(*(table.to(view.low.device, non_blocking=True) for table in tables))
