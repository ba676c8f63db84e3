"""What the rounding of o takes from the gradients of slabs that are not near, and how it is given back.

delta = rowsum(P dP) is taken from rowsum(o do), of the o that bfloat16 holds. The two differ by an excess, which is
known once P (dP - delta) is summed over all keys. dS = P (dP - delta) scale is off by P excess scale: next to nothing,
but where one key has nearly all the weight, and dP - delta vanishes. Its products are then mended: dq by o, gradients
of keys by P^T q. The names are those of the table in `undertow.ops.triton.attention`.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import triton
import triton.language as tl

from undertow.ops.triton.attention.window_forward import LOG2E

NOTICED = tl.constexpr(3.8e-6)
"""Square of the least change of a row, as a share of it, that counts beside its rounding to bfloat16: 2^-18."""

PART = tl.constexpr(16)
"""Rows of o that are taken at a time."""


@triton.jit
def by_eights(x, M: tl.constexpr, BX: tl.constexpr):
    """Sums of eight neighbours of `x [M, BX]`, which a thread has loaded: no exchange between threads."""
    return tl.sum(tl.reshape(x, (M, BX // 8, 8)), 2)


@triton.jit
def of_output(o, do_rows, q_rows, row, inside, M: tl.constexpr, D: tl.constexpr, BX: tl.constexpr):
    """rowsum(o do), rowsum(o o), and rowsum(do do) / rowsum(q q) of M rows.

    `do` and `q` are read once more here on purpose. Taken from the tile of the products (a load that an asynchronous
    product and the registers use) they would get one buffer too few from Triton 3.6, to be overwritten under it.
    """
    delta = tl.zeros((M, BX // 8), tl.float32)
    size = tl.zeros((M, BX // 8), tl.float32)
    of_do = tl.zeros((M, BX // 8), tl.float32)
    of_q = tl.zeros((M, BX // 8), tl.float32)
    at = row.to(tl.int64)[:, None] * D + tl.arange(0, BX)[None, :]
    for c in tl.range(0, D, BX, num_stages=2):
        out = tl.load(o + at + c, inside[:, None], other=0.0).to(tl.float32)
        g = tl.load(do_rows + at + c, inside[:, None], other=0.0).to(tl.float32)
        a = tl.load(q_rows + at + c, inside[:, None], other=0.0).to(tl.float32)
        delta += by_eights(out * g, M, BX)
        size += by_eights(out * out, M, BX)
        of_do += by_eights(g * g, M, BX)
        of_q += by_eights(a * a, M, BX)
    return tl.sum(delta, 1), tl.sum(size, 1), tl.sum(of_do, 1) / tl.sum(of_q, 1)


@triton.jit
def settle_slopes(
    rests, sums, stride, low, high, counts, lse, delta, ratios, sink, sinks, excess, flags,
    start, call_tokens, column, scale,
    H: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """A group of rows: `rests` become rowsum(P dP) - rowsum(o do) over all keys, and `sinks` are made.

    `rests` and the `sums` of each TILE of entries are rowsum(P (dP - delta)) of window and entries. `excess`, a number
    for each of the slab's rows, is rests times scale if that is noticed in the gradients of keys, else 0; the group's
    flag tells whether any is not 0. A key gets P do from a row beside P q excess: what is less than 2^-9 of |do| is not
    noticed.
    """
    r0 = tl.program_id(0) * ROWS
    m = tl.arange(0, ROWS)
    row = start * H + r0 + m
    inside = row < call_tokens * H
    rest = tl.load(rests + row, inside, other=0.0)
    if GATHER:
        first = 0
        end = tl.cdiv(tl.load(counts + (r0 + m) // H, inside, other=0), TILE)
    else:
        first = (tl.load(low + tl.minimum(start + r0 // H, call_tokens - 1)) - column) // TILE
        last = tl.load(high + tl.minimum(start + (r0 + ROWS - 1) // H, call_tokens - 1)) - column
        end = tl.where(inside, tl.cdiv(last, TILE), 0)
    for k in tl.range(first, tl.max(end, 0), num_stages=1):
        rest += tl.load(sums + k * stride + r0 + m, k < end, other=0.0)
    share = tl.exp2((tl.load(sink + (r0 + m) % H) - tl.load(lse + row, inside, other=0.0)) * LOG2E)
    # rowsum(P dP) = rowsum(P (dP - delta)) + rowsum(P) delta.
    row_delta = tl.load(delta + row, inside, other=0.0)
    tl.store(sinks + row, share * (rest + (1.0 - share) * row_delta), inside)
    rest -= share * row_delta
    tl.store(rests + row, rest, inside)
    noticed = inside & (rest * rest * (scale * scale) > NOTICED * tl.load(ratios + row, inside, other=0.0))
    tl.store(excess + r0 + m, tl.where(noticed, rest * scale, 0.0))
    tl.store(flags + tl.program_id(0), tl.max(noticed.to(tl.int32), 0))


@triton.jit
def queries_mended(acc, o, row, inside, c, rests, sizes, scale, M: tl.constexpr, D: tl.constexpr, BN: tl.constexpr):
    """dq of M rows from `row` on and BN columns for the delta of the unrounded o: `acc` less o times rest and scale.

    o is read only if that is noticed in some row, if it is more than 2^-9 of |acc|: half of the largest rounding to
    bfloat16. Their squares are compared, and of `sizes` = |o|^2, which is that of all D columns, these are taken to
    have BN / D.
    """
    m = tl.arange(0, M)
    rest = tl.load(rests + row + m, inside, other=0.0) * scale
    size = tl.load(sizes + row + m, inside, other=0.0)
    if tl.max((rest * rest * size * (BN / D) > NOTICED * tl.sum(acc * acc, 1)).to(tl.int32), 0) != 0:
        # A product with a diagonal matrix, in parts: there are no registers for o too.
        for j in tl.range(0, M, PART, num_stages=1):
            factor = tl.where(m[:, None] == j + tl.arange(0, PART)[None, :], -rest[:, None], 0.0)
            acc = tl.dot(factor.to(tl.bfloat16), o.load([row + j, c]), acc)
    return acc


@triton.jit
def flagged(flags, first, last, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Whether any of the rows `first` to `last`, whole groups and at most GROUPS of them, has an excess."""
    g = tl.arange(0, GROUPS)
    return tl.max(tl.load(flags + first // ROWS + g, g < (last - first) // ROWS, other=0), 0) != 0


@triton.jit
def keys_mended(acc, q, p, excess, r, row, c, k0, BH: tl.constexpr):
    """`acc`, gradients of keys transposed, less (P^T q excess)^T of BH rows, which are `r` of the slab, `row` of q."""
    factor = tl.load(excess + r + tl.arange(0, BH))
    a = q.load([row, c]).T.to(tl.float32) * -factor[None, :]
    return tl.dot(a.to(tl.bfloat16), p.load([r, k0]), acc)
