"""Kernels of compressor pooling: a program holds all slots of a window for some of its channels.

A row is in one window in all that a model makes: a token belongs to one group, and its overlap half to the next one.
Then the window's program writes the row's gradients. Rows in no window, or in several, are found by their `counts`,
which the forward pass makes, and written by a kernel of their own.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _gates(v, ape, row, j, c, channels, wide):
    """Gates of a window's slots `[BJ, BC]`, where the rows lie, and whether they are there."""
    there = (c < channels)[None, :]
    held = (row >= 0)[:, None] & there
    at = row[:, None] * channels + c[None, :]
    position = tl.load(ape + j[:, None] * channels + c[None, :], (j < wide)[:, None] & there, other=0.0)
    return tl.load(v + at, held, other=0.0) + position, at, held


@triton.jit
def pool_windows(
    u, v, ape, slots, entry, lse, top, weight, value, counts, channels, wide,
    BJ: tl.constexpr, BC: tl.constexpr, LEARNS: tl.constexpr,
):  # fmt: skip
    """Entry, log-sum-exp and running softmax of one window of `wide` slots, BC channels. LEARNS: rows are counted."""
    g = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    j = tl.arange(0, BJ)
    row = tl.load(slots + g * wide + j, j < wide, other=-1)
    gate, at, held = _gates(v, ape, row, j, c, channels, wide)
    gate = tl.where(held, gate, -float("inf"))
    highest = tl.max(gate, 0)
    # A window without slots has a weight of 0, not exp(-inf + inf).
    share = tl.exp2((gate - tl.where(highest == -float("inf"), 0.0, highest)[None, :]) * LOG2E)
    total = tl.sum(share, 0)
    sum_u = tl.sum(share * tl.load(u + at, held, other=0.0), 0)
    out, there = g * channels + c, c < channels
    tl.store(entry + out, sum_u / total, there)
    tl.store(top + out, highest, there)
    tl.store(weight + out, total, there)
    tl.store(value + out, sum_u, there)
    if LEARNS:
        tl.store(lse + out, highest + tl.log2(total) / LOG2E, there)
        if tl.program_id(1) == 0:
            tl.atomic_add(counts + row, 1, row >= 0)  # whole numbers: any order gives the same


@triton.jit
def _slopes(u, v, ape, lse, entry, grad, row, g, j, c, channels, wide):
    """Gradients of a window's values and gates `[BJ, BC]`, where they belong, and whether they are there."""
    gate, at, held = _gates(v, ape, row, j, c, channels, wide)
    out, there = g * channels + c, c < channels
    share = tl.exp2((gate - tl.load(lse + out, there, other=0.0)[None, :]) * LOG2E)
    of_u = tl.where(held, share * tl.load(grad + out, there, other=0.0)[None, :], 0.0)
    apart = tl.load(u + at, held, other=0.0) - tl.load(entry + out, there, other=0.0)[None, :]
    return of_u, tl.where(held, of_u * apart, 0.0), at, held


@triton.jit
def pool_slopes(
    u, v, ape, slots, lse, entry, grad, counts, grad_u, grad_v, parts, windows, channels, wide, each,
    BJ: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradients of rows that are in one window, for `each` windows and BC channels, and this part of those of ape."""
    b = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    j = tl.arange(0, BJ)
    acc = tl.zeros((BJ, BC), tl.float32)
    for i in tl.range(0, tl.minimum(windows - b * each, each).to(tl.int32), num_stages=1):
        g = b * each + i
        row = tl.load(slots + g * wide + j, j < wide, other=-1)
        of_u, of_v, at, held = _slopes(u, v, ape, lse, entry, grad, row, g, j, c, channels, wide)
        mine = held & (tl.load(counts + row, row >= 0, other=0) == 1)[:, None]
        tl.store(grad_u + at, of_u, mine)
        tl.store(grad_v + at, of_v, mine)
        acc += of_v
    place = (b * wide + j)[:, None] * channels + c[None, :]
    tl.store(parts + place, acc, (j < wide)[:, None] & (c < channels)[None, :])


@triton.jit
def pool_other_rows(
    u, v, ape, slots, lse, entry, grad, counts, grad_u, grad_v, rows, all_slots, channels, wide,
    BR: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Gradients of those of BR rows that are in no window, which are 0, or in several: the sum over them, in order."""
    r0 = tl.program_id(0).to(tl.int64) * BR
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    r = r0 + tl.arange(0, BR)
    count = tl.load(counts + r, r < rows, other=1)
    at = r[:, None] * channels + c[None, :]
    lone = (count == 0)[:, None] & (c < channels)[None, :]
    tl.store(grad_u + at, tl.zeros((BR, BC), tl.float32), lone)
    tl.store(grad_v + at, tl.zeros((BR, BC), tl.float32), lone)
    if tl.max(count, 0) > 1:
        for i in tl.range(0, BR):
            row = r0 + i
            if tl.load(counts + row, row < rows, other=0) > 1:
                of_u = tl.zeros((1, BC), tl.float32)
                of_v = tl.zeros((1, BC), tl.float32)
                for s0 in tl.range(0, all_slots, BS):
                    s = s0 + tl.arange(0, BS)
                    hit = tl.load(slots + s, s < all_slots, other=-1) == row
                    last = tl.full((), -1, tl.int32)
                    for _ in tl.range(0, tl.sum(hit.to(tl.int32), 0)):
                        last = tl.min(tl.where(hit & (s > last), s, all_slots), 0)
                        here = row + tl.zeros((1,), tl.int64)
                        j = last % wide + tl.zeros((1,), tl.int32)
                        more = _slopes(
                            u, v, ape, lse, entry, grad, here, (last // wide).to(tl.int64), j, c, channels, wide
                        )
                        of_u += more[0]
                        of_v += more[1]
                place = row * channels + c[None, :]
                tl.store(grad_u + place, of_u, (c < channels)[None, :])
                tl.store(grad_v + place, of_v, (c < channels)[None, :])


@triton.jit
def sum_parts(parts, out, count, size, BP: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK numbers of `out [size]`: the sum of `parts [count, size]`, in their order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BP, BLOCK), tl.float32)
    for first in tl.range(0, count, BP, num_stages=2):
        p = first + tl.arange(0, BP)
        place = p.to(tl.int64)[:, None] * size + at[None, :]
        acc += tl.load(parts + place, (p < count)[:, None] & (at < size)[None, :], other=0.0)
    tl.store(out + at, tl.sum(acc, 0), at < size)
