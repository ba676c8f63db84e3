"""Backward of the entries in the dense form: every column of a slab is multiplied, what a token may not see is masked.

A tile of `BK` entries is written for the tokens of a group (`GROUP` rows) if one of them sees into it, and only such
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
from undertow.ops.triton.attention.window_backward import LOG2E, of_unrounded

GROUP = 128
"""Rows (token x head) that share what is written of the entries."""
_CHUNK = 144 * 64
"""Rows that a program of `pool_keys` sums: its programs then fill whole waves on an H200."""


@triton.jit
def pool_scores(
    q, do, kv, pp, sp, bits, low, high, lse, delta, sums, stride, start, tokens, column, words, scale,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
    CHOSEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """M rows x BK entries: P, dS (zero where the entry is not seen or, CHOSEN, its bit is off), sums of dS / scale."""
    k0 = column + tl.program_id(0) * BK
    r0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * M
    group = r0 // GROUP * GROUP
    last = tl.minimum(start + (group + GROUP - 1) // H, tokens - 1)
    if (k0 < tl.load(high + last)) & (k0 + BK > tl.load(low + start + group // H)):
        row = start * H + r0
        m = tl.arange(0, M)
        j = k0 + tl.arange(0, BK)
        here = start + (r0 + m) // H < tokens
        # Masks are rows of one vector a token; bits are asked for before the products, and come while those run.
        TOKENS: tl.constexpr = M // H if M > H else 1
        first = r0 // H
        if CHOSEN:
            at = bits + first.to(tl.int64) * words + (j - column) // 32
            on = ((tl.load(at, start + first + j * 0 < tokens, other=0) >> (j % 32)) & 1 != 0)[None, :]
            for i in tl.static_range(1, TOKENS):
                word = tl.load(at + i * words, start + first + i + j * 0 < tokens, other=0)
                on = tl.where((m // H < i)[:, None], on, ((word >> (j % 32)) & 1 != 0)[None, :])
        s = tl.zeros((M, BK), tl.float32)
        d = tl.zeros((M, BK), tl.float32)
        for c in tl.range(0, D, BD, num_stages=STAGES):
            a = q.load([row, c])
            b = do.load([row, c])
            k = kv.load([k0, c])
            s = tl.dot(a, k.T, s)
            d = tl.dot(b, k.T, d)
        if not CHOSEN:
            if TOKENS == 1:
                tok = first + tl.zeros((1,), tl.int32)
            else:
                tok = first + m // H
            inside = start + tok < tokens
            lo = tl.load(low + start + tok, inside, other=0)
            hi = tl.load(high + start + tok, inside, other=0)
            on = (j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None])
        z = tl.load(lse + row + m, here, other=0.0) * LOG2E
        x = tl.load(delta + row + m, here, other=0.0)
        p = tl.where(on, tl.exp2(s * (scale * LOG2E) - z[:, None]), 0.0)
        pp.store([r0, k0 - column], p.to(tl.bfloat16))
        d = p * (d - x[:, None])
        tl.store(sums + tl.program_id(0) * stride + r0 + m, tl.sum(d, 1))
        sp.store([r0, k0 - column], (d * scale).to(tl.bfloat16))


@triton.jit
def pool_queries(
    so, sn, sp, kvo, kvn, kvp, dq, o, low, high, lse, delta, size, sink, rests, gs, sums, stride,
    start, tokens, column, scale,
    H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
    BK: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A group of rows, BN columns: dq = dS K over the window's fixed columns and every entry that its tokens see.

    `rests` and the `sums` of each TILE of entries are rowsum(P (dP - delta)) of window and entries. The first columns'
    program makes `gs` of them.
    """
    c = tl.program_id(0) * BN
    r0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * GROUP
    t0 = start + r0 // (BT * H) * BT
    lo = tl.load(low + start + r0 // H) // BK * BK
    hi = tl.load(high + tl.minimum(start + (r0 + GROUP - 1) // H, tokens - 1))
    acc = tl.zeros((GROUP, BN), tl.float32)
    for k in tl.range(lo, hi, BK, num_stages=STAGES):
        acc = tl.dot(sp.load([r0, k - column]), kvp.load([k, c]), acc)
    for k in tl.range(0, W, BW, num_stages=STAGES):
        acc = tl.dot(so.load([r0, k]), kvo.load([t0 - W + k, c]), acc)
    acc = tl.dot(sn.load([r0, 0]), kvn.load([t0, c]), acc)
    m = tl.arange(0, GROUP)
    row = start * H + r0 + m
    here = row < tokens * H
    x = tl.load(rests + row, here, other=0.0)
    for k in tl.range((lo - column) // TILE, tl.cdiv(hi - column, TILE), num_stages=1):
        x += tl.load(sums + k * stride + r0 + m)
    share = tl.exp2((tl.load(sink + (r0 + m) % H) - tl.load(lse + row, here, other=0.0)) * LOG2E)
    # rowsum(P dP) = rowsum(P (dP - delta)) + rowsum(P) delta.
    old = tl.load(delta + row, here, other=0.0)
    rest = x - share * old
    acc = of_unrounded(acc, o, row, here, c, rest, tl.load(size + row, here, other=0.0), scale, D, BN)
    dq.store([start * H + r0, c], acc.to(tl.bfloat16))
    if c == 0:
        tl.store(gs + row, share * (rest + old), here)


@triton.jit
def pool_keys(
    q, do, pp, sp, parts, plan, start, column,
    H: tl.constexpr, D: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BK entries x BN columns over the tokens of one piece of the plan: P^T do + dS^T q, to its place in `parts`."""
    pid = tl.program_id(0)
    piece = pid // (D // BN)
    k0 = tl.load(plan + piece * 3) - column
    lo = (tl.load(plan + piece * 3 + 1) - start) * H
    hi = (tl.load(plan + piece * 3 + 2) - start) * H
    c = pid % (D // BN) * BN
    # Transposed: otherwise Triton 3.6 does not let the result reuse the loop's shared memory.
    acc = tl.zeros((BN, BK), tl.float32)
    for r in tl.range(lo, hi, BH, num_stages=STAGES):
        acc = tl.dot(do.load([start * H + r, c]).T, pp.load([r, k0]), acc)
        acc = tl.dot(q.load([start * H + r, c]).T, sp.load([r, k0]), acc)
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
    key = ("pool pieces", ratio, heads, slab)
    if key not in segments._memo:
        segments._memo[key] = _plan(view, slab, heads)
    return segments._memo[key]


def _plan(view: Sight, slab: Slab, heads: int) -> Plan:
    low, high = view.seen[:, slab.start : slab.stop].tolist()
    unit = max(GROUP // heads, 1)
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
