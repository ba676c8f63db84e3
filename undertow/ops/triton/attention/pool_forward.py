"""Forward over the entries: probabilities of each tile of them, then their product with all keys of a token.

Probabilities are kept as they are, against 2^0, so that window and entries need not wait for each other. A row of a
tile whose greatest exponential is not within 2^-60 and 2^60 is kept against a power of two of its own, its shift;
`settle_shifts` brings the tiles of such rows to one reference before the second pass. A product with a power of two is
exact. Scores of normalised queries and keys never need it.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
# The language of kernels has types of its own.
from __future__ import annotations

import triton
import triton.language as tl

from undertow.ops.triton.attention.selection import row_read
from undertow.ops.triton.attention.window_forward import LOG2E, of_window

UNSHIFTED = tl.constexpr(60.0)
"""A row whose greatest score, in base 2, is no further from 0 is kept as it is: P, sums and products stay far inside
bfloat16 and float32, whose exponents go to 127, and what is 2^60 times less than the greatest still counts."""


@triton.jit
def visible(counts, low, high, start, tokens, pid, TOKENS: tl.constexpr, GATHER: tl.constexpr):
    """First and end of what the program's tokens see: entries, or slots of the chosen rows."""
    if GATHER:
        return 0, tl.load(counts + pid)
    last = tl.minimum(pid * TOKENS + TOKENS, tokens) - 1
    return tl.load(low + start + pid * TOKENS), tl.load(high + start + last)


@triton.jit
def columns_of(
    counts, low, high, start, tokens, column, columns, pid,
    TOKENS: tl.constexpr, GATHER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """First and end of the columns that the first pass wrote for the program's tokens, the first in tiles."""
    begin, end = visible(counts, low, high, start, tokens, pid, TOKENS, GATHER)
    first = tl.maximum(begin - column, 0) // TILE * TILE
    return first, tl.minimum(end - column, columns)


@triton.jit
def shift_of(most):
    """The power of two a row is kept against, from its greatest score: 0 within bounds, -inf for a row without any."""
    return tl.where(tl.abs(most) > UNSHIFTED, tl.ceil(most), 0.0)


@triton.jit
def keep_window(
    q, old, new, p_old, p_new, shifts, totals, sink, begin, start, tokens, scale, pid,
    H: tl.constexpr, D: tl.constexpr, OLD: tl.constexpr, NEW: tl.constexpr, WINDOW: tl.constexpr,
    TOKENS: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """P of the tokens' window, and the sums of its rows with the sink; as `window_forward` has them."""
    M: tl.constexpr = TOKENS * H
    row = pid * M
    own = pid * TOKENS // NEW * NEW
    t0 = start + own
    m = tl.arange(0, M)
    token = pid * TOKENS + m // H
    inside = token < tokens
    s0 = tl.zeros((M, OLD), tl.float32)
    s1 = tl.zeros((M, NEW), tl.float32)
    for c in tl.range(0, D, BD, num_stages=STAGES):
        a = q.load([row, c])
        s0 = tl.dot(a, old.load([t0 - OLD, c]).T, s0)
        s1 = tl.dot(a, new.load([t0, c]).T, s1)
    c2 = scale * LOG2E
    r = token - own
    first = tl.load(begin + start + token, inside, other=0) - t0
    z = tl.load(sink + m % H) * LOG2E
    s0, s1 = of_window(s0, s1, r, first, c2, OLD, NEW, WINDOW)
    shift = shift_of(tl.maximum(tl.maximum(tl.max(s0, 1), tl.max(s1, 1)), z))
    s0 = tl.exp2(s0 - shift[:, None])
    s1 = tl.exp2(s1 - shift[:, None])
    p_old.store([row, 0], s0.to(tl.bfloat16))
    p_new.store([row, 0], s1.to(tl.bfloat16))
    tl.store(totals + row + m, tl.exp2(z - shift) + tl.sum(s0, 1) + tl.sum(s1, 1), inside)
    tl.store(shifts + row + m, shift, inside)


@triton.jit
def keep_entries(s, on, p, shifts, totals, row, k0, tile, rows, scale, M: tl.constexpr, BK: tl.constexpr):
    """P of a tile of entries from its products `s`, where `on`; sums and shifts to the tile's line of `rows`."""
    s = tl.where(on, s * (scale * LOG2E), float("-inf"))
    most = tl.max(s, 1)
    shift = shift_of(most)
    s = tl.exp2(s - tl.where(most > float("-inf"), shift, 0.0)[:, None])
    p.store([row, k0], s.to(tl.bfloat16))
    m = row + tl.arange(0, M)
    tl.store(totals + tile * rows + m, tl.sum(s, 1), m < rows)
    tl.store(shifts + tile * rows + m, shift, m < rows)


@triton.jit
def window_probabilities(
    q, old, new, p_old, p_new, shifts, totals, sink, begin, start, tokens, scale,
    H: tl.constexpr, D: tl.constexpr, OLD: tl.constexpr, NEW: tl.constexpr, WINDOW: tl.constexpr,
    TOKENS: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The window of TOKENS tokens of a slab, in the gather form."""
    keep_window(
        q, old, new, p_old, p_new, shifts, totals, sink, begin, start, tokens, scale, tl.program_id(0),
        H, D, OLD, NEW, WINDOW, TOKENS, BD, STAGES,
    )  # fmt: skip


@triton.jit
def dense_probabilities(
    q, old, new, keys, bits, p_old, p_new, p, shifts, totals, sink, begin, low, high,
    start, tokens, column, columns, scale,
    H: tl.constexpr, D: tl.constexpr, OLD: tl.constexpr, NEW: tl.constexpr, WINDOW: tl.constexpr,
    TOKENS: tl.constexpr, BITS: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of a slab: their window (tile 0), or BK of its columns, entries from `column` on (tile 1 and on).

    Entries are masked by `bits`, or by what a token sees. Shifts and totals are `[1 + columns / BK, tokens * H]`. A
    tile is written only if one of its tokens may see some of it.
    """
    M: tl.constexpr = TOKENS * H
    tile = tl.program_id(0)
    # Tokens with most entries come first.
    pid = tl.num_programs(1) - 1 - tl.program_id(1)
    k0 = (tile - 1) * BK
    if tile == 0:
        keep_window(
            q, old, new, p_old, p_new, shifts, totals, sink, begin, start, tokens, scale, pid,
            H, D, OLD, NEW, WINDOW, TOKENS, BD, STAGES,
        )  # fmt: skip
    else:
        first, end = visible(low, low, high, start, tokens, pid, TOKENS, False)
        if (k0 + column < end) & (k0 + column + BK > first):
            row = pid * M
            m = tl.arange(0, M)
            k = k0 + tl.arange(0, BK)
            if BITS:
                # Asked for before the products, to come while those run.
                words = bits + pid * TOKENS * (columns // 32) + k // 32
                word = tl.load(words)
                if TOKENS == 2:
                    second = tl.load(words + columns // 32, pid * TOKENS + 1 + k * 0 < tokens, other=0)
            s = tl.zeros((M, BK), tl.float32)
            for c in tl.range(0, D, BD, num_stages=STAGES):
                s = tl.dot(q.load([row, c]), keys.load([column + k0, c]).T, s)
            if BITS:
                if TOKENS <= 2:
                    on = ((word >> (k % 32)) & 1 != 0)[None, :]
                    if TOKENS == 2:
                        on = tl.where((m < H)[:, None], on, ((second >> (k % 32)) & 1 != 0)[None, :])
                else:
                    i = tl.arange(0, TOKENS)[:, None]
                    word = tl.load(words[None, :] + i * (columns // 32), pid * TOKENS + i < tokens, other=0)
                    bit = ((word >> (k % 32)[None, :]) & 1).to(tl.int8)
                    on = tl.reshape(tl.broadcast_to(bit[:, None, :], (TOKENS, H, BK)), (M, BK)) != 0
            else:
                token = pid * TOKENS + m // H
                lo = tl.load(low + start + token, token < tokens, other=0) - column
                hi = tl.load(high + start + token, token < tokens, other=0) - column
                on = (k[None, :] >= lo[:, None]) & (k[None, :] < hi[:, None])
            keep_entries(s, on, p, shifts, totals, row, k0, tile, tokens * H, scale, M, BK)


@triton.jit
def gather_probabilities(
    q, entries, rows, counts, p, shifts, totals, tokens, columns, scale,
    H: tl.constexpr, D: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One token of a slab and BK of its `columns` slots: as `dense_probabilities`, of the rows it chose."""
    k0 = tl.program_id(0) * BK
    pid = tl.num_programs(1) - 1 - tl.program_id(1)
    if k0 < tl.load(counts + pid):
        row = pid * H
        picked = tl.load(rows + pid * columns + k0 + tl.arange(0, BK))
        on = (picked >= 0)[None, :]
        n = row_read(picked)
        s = tl.zeros((H, BK), tl.float32)
        for c in tl.range(0, D, BD, num_stages=STAGES):
            b = tl.load(entries + n[:, None] * D + c + tl.arange(0, BD)[None, :])
            s = tl.dot(q.load([row, c]), b.T, s)
        keep_entries(s, on, p, shifts, totals, row, k0, 1 + tl.program_id(0), tokens * H, scale, H, BK)


@triton.jit
def settle_shifts(
    p_old, p_new, p, shifts, totals, counts, low, high, start, tokens, column, columns,
    H: tl.constexpr, OLD: tl.constexpr, NEW: tl.constexpr, TOKENS: tl.constexpr, GATHER: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Brings the rows of the program's tokens to one reference if any has a shift, in place; the first line of `shifts`
    then has it."""
    M: tl.constexpr = TOKENS * H
    pid = tl.program_id(0)
    row = pid * M
    m = row + tl.arange(0, M)
    inside = m < tokens * H
    k1, k2 = columns_of(counts, low, high, start, tokens, column, columns, pid, TOKENS, GATHER, TILE)
    most = tl.load(shifts + m, inside, other=0.0)
    moved = tl.abs(most)
    for k in tl.range(k1, k2, TILE, num_stages=1):
        shift = tl.load(shifts + (1 + k // TILE) * (tokens * H) + m, inside, other=0.0)
        most = tl.maximum(most, shift)
        moved = tl.maximum(moved, tl.where(shift > float("-inf"), tl.abs(shift), 0.0))
    if tl.max(moved, 0) > 0:
        share = tl.exp2(tl.load(shifts + m, inside, other=0.0) - most)
        for k in tl.range(0, OLD, 16, num_stages=1):
            p_old.store([row, k], (p_old.load([row, k]).to(tl.float32) * share[:, None]).to(tl.bfloat16))
        p_new.store([row, 0], (p_new.load([row, 0]).to(tl.float32) * share[:, None]).to(tl.bfloat16))
        tl.store(totals + m, tl.load(totals + m, inside) * share, inside)
        tl.store(shifts + m, most, inside)
        for k in tl.range(k1, k2, TILE, num_stages=1):
            at = (1 + k // TILE) * (tokens * H) + m
            share = tl.exp2(tl.load(shifts + at, inside, other=0.0) - most)
            tl.store(totals + at, tl.load(totals + at, inside) * share, inside)
            for c in tl.range(k, k + TILE, 16, num_stages=1):
                p.store([row, c], (p.load([row, c]).to(tl.float32) * share[:, None]).to(tl.bfloat16))


@triton.jit
def mix_values(
    p_old, p_new, p, old, new, keys, entries, rows, counts, o, lse, shifts, totals,
    low, high, start, tokens, column, columns,
    H: tl.constexpr, D: tl.constexpr, OLD: tl.constexpr, NEW: tl.constexpr, TOKENS: tl.constexpr,
    GATHER: tl.constexpr, BO: tl.constexpr, TILE: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens, BN columns of a head: o from the P of window and entries; one of the programs finishes lse.

    TILE is the first pass' BK; `old` describes BO rows of the window. Reads the tiles that the first pass wrote.
    """
    M: tl.constexpr = TOKENS * H
    c = tl.program_id(0) * BN
    pid = tl.num_programs(1) - 1 - tl.program_id(1)
    row = pid * M
    t0 = start + pid * TOKENS // NEW * NEW
    k1, k2 = columns_of(counts, low, high, start, tokens, column, columns, pid, TOKENS, GATHER, TILE)
    acc = tl.zeros((M, BN), tl.float32)
    for k in tl.range(k1, k2, BK, num_stages=STAGES):
        if GATHER:
            n = row_read(tl.load(rows + pid * columns + k + tl.arange(0, BK)))
            b = tl.load(entries + n[:, None] * D + c + tl.arange(0, BN)[None, :])
        else:
            b = keys.load([column + k, c])
        acc = tl.dot(p.load([row, k]), b, acc)
    for k in tl.range(0, OLD, BO, num_stages=STAGES):
        acc = tl.dot(p_old.load([row, k]), old.load([t0 - OLD + k, c]), acc)
    acc = tl.dot(p_new.load([row, 0]), new.load([t0, c]), acc)
    m = row + tl.arange(0, M)
    inside = m < tokens * H
    total = tl.load(totals + m, inside, other=1.0)
    for k in tl.range(k1, k2, TILE, num_stages=1):
        total += tl.load(totals + (1 + k // TILE) * (tokens * H) + m, inside, other=0.0)
    if c == 0:
        tl.store(lse + m, (tl.load(shifts + m, inside, other=0.0) + tl.log2(total)) / LOG2E, inside)
    o.store([row, c], (acc * (1 / total)[:, None]).to(tl.bfloat16))
