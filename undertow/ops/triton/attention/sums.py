"""Partial gradients of keys summed in a fixed order: the same bits whenever the same call is made."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_window(
    parts, out, start, tokens, blocks, ahead,
    D: tl.constexpr, OLD: tl.constexpr, NEW: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The rows of one block of tokens: the parts of the `OLD / NEW` blocks after it and its own.

    The slab's rows are written; those of the `ahead` blocks before it hold what the slab before has written.
    """
    b = tl.program_id(0) - ahead
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    r = tl.arange(0, NEW)
    acc = tl.zeros((NEW, BN), tl.float32)
    for k in tl.static_range(OLD // NEW + 1):
        block = b + k + tl.zeros((NEW,), tl.int32)
        at = parts + (block.to(tl.int64) * (OLD + NEW) + OLD - k * NEW + r)[:, None] * D
        acc += tl.load(at + c[None, :], ((block >= 0) & (block < blocks))[:, None], other=0.0)
    row = start + b * NEW + r
    here = (row < tokens)[:, None]
    at = out + row.to(tl.int64)[:, None] * D + c[None, :]
    if b < 0:
        acc += tl.load(at, here, other=0.0).to(tl.float32)
    tl.store(at, acc.to(out.dtype.element_ty), here)


@triton.jit
def sum_near(
    parts, low, spans, out, start, first, count,
    D: tl.constexpr, NEW: tl.constexpr, NEAR: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """One entry, BN columns: the parts of the blocks `spans[entry]` to `spans[count + entry]` added to `out`."""
    n = tl.program_id(0)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    end = tl.load(spans + count + n)
    acc = tl.zeros((BR, BN), tl.float32)
    for i in tl.range(tl.load(spans + n), end, BR):
        b = i + tl.arange(0, BR)
        place = first + n - tl.load(low + start + b * NEW, b < end, other=0)
        at = parts + (b * NEAR + place).to(tl.int64)[:, None] * D
        acc += tl.load(at + c[None, :], (b < end)[:, None], other=0.0)
    at = out + (first + n).to(tl.int64) * D + c
    tl.store(at, tl.load(at) + tl.sum(acc, 0))


@triton.jit
def sum_pool(
    parts, order, offsets, out, column, entries,
    D: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BR rows of one tile of entries, BN columns: the tile's parts, in the order of tokens, added to `out`."""
    tile = tl.program_id(0) // (BK // BR)
    r = tl.program_id(0) % (BK // BR) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BR, BN), tl.float32)
    for i in tl.range(tl.load(offsets + tile), tl.load(offsets + tile + 1), num_stages=4):
        at = parts + tl.load(order + i).to(tl.int64) * (BK * D)
        acc += tl.load(at + r[:, None] * D + c[None, :])
    row = column + tile * BK + r
    here = (row < entries)[:, None]
    at = out + row.to(tl.int64)[:, None] * D + c[None, :]
    tl.store(at, tl.load(at, here, other=0.0) + acc, here)


@triton.jit
def sum_chosen(
    parts, starts, order, out, column,
    D: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One entry, BN columns: its bf16 parts, found through an inverted index, added to `out`."""
    n = tl.program_id(0)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    end = tl.load(starts + n + 1)
    acc = tl.zeros((BR, BN), tl.float32)
    for i in tl.range(tl.load(starts + n), end, BR, num_stages=STAGES):
        k = i + tl.arange(0, BR)
        at = parts + tl.load(order + k, k < end, other=0).to(tl.int64)[:, None] * D
        acc += tl.load(at + c[None, :], (k < end)[:, None], other=0.0).to(tl.float32)
    at = out + (column + n).to(tl.int64) * D + c
    tl.store(at, tl.load(at) + tl.sum(acc, 0))
