"""Backward of the window: a head's probabilities and their slopes are written once, later passes only multiply.

Tokens go in blocks of `NEW` that share the key rows `[t0 - OLD, t0)` and `[t0, t0 + NEW)`, and in the near form `NEAR`
entries from the first that the block sees. Masks zero what a token may not see, so that P and dS have fixed columns and
nothing after needs a mask. Rows are token x head, counted from the slab's first token in what is spilled. The names are
those of the table in `undertow.ops.triton.attention`.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import triton
import triton.language as tl

from undertow.ops.triton.attention.rounding import flagged, keys_mended, of_output
from undertow.ops.triton.attention.window_forward import LOG2E, sees


@triton.jit
def window_weights(s0, s1, r, t0, begins, row_lse, c2, OLD: tl.constexpr, NEW: tl.constexpr, WINDOW: tl.constexpr):
    """P of the old and the new rows from their scores, 0 where a token, the `r`-th of its block, does not see them."""
    j = tl.arange(0, OLD)
    n = tl.arange(0, NEW)
    on_old = (t0 - OLD + j[None, :] >= begins[:, None]) & (r[:, None] + OLD - j[None, :] < WINDOW)
    p0 = tl.where(on_old, tl.exp2(s0 * c2 - row_lse[:, None]), 0.0)
    on_new = (t0 + n[None, :] >= begins[:, None]) & (n[None, :] <= r[:, None])
    on_new &= r[:, None] - n[None, :] < WINDOW
    p1 = tl.where(on_new, tl.exp2(s1 * c2 - row_lse[:, None]), 0.0)
    return p0, p1


@triton.jit
def window_scores(
    q, do, o, do_rows, q_rows, old, new, near, old_for_dq, new_for_dq, near_for_dq, dq,
    p_old, ds_old, p_new, ds_new, p_near, ds_near,
    begin, low, high, lse, delta, sizes, ratios, sink, sinks_or_rests, start, call_tokens, scale,
    WINDOW: tl.constexpr, H: tl.constexpr, D: tl.constexpr, OLD: tl.constexpr, NEW: tl.constexpr, NEAR: tl.constexpr,
    M: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, FULL: tl.constexpr, STAGES: tl.constexpr,
    STAGES2: tl.constexpr,
):  # fmt: skip
    """M rows: P and dS of the window, and of `NEAR` entries if that is not 0.

    FULL: these are all keys, so that delta = rowsum(P dP), and dq and each row's share of the sink's gradient (into
    `sinks_or_rests`) are finished here; what `rounding` needs is not used. Otherwise delta = rowsum(o do), kept for the
    entries with `sizes` = rowsum(o o) and `ratios` = rowsum(do do) / rowsum(q q), and `sinks_or_rests` gets
    rowsum(P (dP - delta)) of the window. `do_rows` and `q_rows` are the memory that `do` and `q` describe; those named
    `_for_dq` describe the same keys for the last product.
    """
    r0 = tl.program_id(0) * M
    row = start * H + r0
    t0 = start + r0 // (NEW * H) * NEW
    m = tl.arange(0, M)
    token = start + (r0 + m) // H
    inside = token < call_tokens
    s0 = tl.zeros((M, OLD), tl.float32)
    d0 = tl.zeros((M, OLD), tl.float32)
    s1 = tl.zeros((M, NEW), tl.float32)
    d1 = tl.zeros((M, NEW), tl.float32)
    if NEAR:
        n0 = tl.load(low + t0)
        s2 = tl.zeros((M, NEAR), tl.float32)
        d2 = tl.zeros((M, NEAR), tl.float32)
    if not FULL:
        row_delta, row_size, row_ratio = of_output(o, do_rows, q_rows, row + m, inside, M, D, BX)
    for c in tl.range(0, D, BD, num_stages=STAGES):
        a = q.load([row, c])
        g = do.load([row, c])
        k_old = old.load([t0 - OLD, c])
        k_new = new.load([t0, c])
        s0 = tl.dot(a, k_old.T, s0)
        d0 = tl.dot(g, k_old.T, d0)
        s1 = tl.dot(a, k_new.T, s1)
        d1 = tl.dot(g, k_new.T, d1)
        if NEAR:
            k_near = near.load([n0, c])
            s2 = tl.dot(a, k_near.T, s2)
            d2 = tl.dot(g, k_near.T, d2)
    c2 = scale * LOG2E
    # In base 2, as everything that exp2 takes.
    row_lse = tl.load(lse + row + m, inside, other=0.0) * LOG2E
    # Rows beyond the last token see nothing.
    begins = tl.load(begin + token, inside, other=1 << 30)
    r = token - t0
    p0, p1 = window_weights(s0, s1, r, t0, begins, row_lse, c2, OLD, NEW, WINDOW)
    if NEAR:
        p2 = tl.where(sees(n0, low, high, token, inside, NEAR), tl.exp2(s2 * c2 - row_lse[:, None]), 0.0)
    if FULL:
        share = tl.exp2(tl.load(sink + (r0 + m) % H) * LOG2E - row_lse)
        row_delta = tl.sum(p0 * d0, 1) + tl.sum(p1 * d1, 1)
        whole = share + tl.sum(p0, 1) + tl.sum(p1, 1)
        if NEAR:
            row_delta += tl.sum(p2 * d2, 1)
            whole += tl.sum(p2, 1)
        # 1, but for the rounding of a large log-sum-exp, by which all of P would be off, and delta no longer its mean.
        row_delta = tl.where(inside, row_delta / whole, 0.0)
        tl.store(sinks_or_rests + row + m, share * row_delta, inside)
    d0 = p0 * (d0 - row_delta[:, None])
    d1 = p1 * (d1 - row_delta[:, None])
    if not FULL:
        tl.store(delta + row + m, row_delta, inside)
        tl.store(sizes + row + m, row_size, inside)
        tl.store(ratios + row + m, row_ratio, inside)
        tl.store(sinks_or_rests + row + m, tl.sum(d0, 1) + tl.sum(d1, 1), inside)
    b0 = (d0 * scale).to(tl.bfloat16)
    b1 = (d1 * scale).to(tl.bfloat16)
    p_old.store([r0, 0], p0.to(tl.bfloat16))
    p_new.store([r0, 0], p1.to(tl.bfloat16))
    ds_old.store([r0, 0], b0)
    ds_new.store([r0, 0], b1)
    if NEAR:
        b2 = (p2 * (d2 - row_delta[:, None]) * scale).to(tl.bfloat16)
        p_near.store([r0, 0], p2.to(tl.bfloat16))
        ds_near.store([r0, 0], b2)
    if FULL:
        for c in tl.range(0, D, BN, num_stages=STAGES2):
            acc = tl.dot(b0, old_for_dq.load([t0 - OLD, c]))
            acc = tl.dot(b1, new_for_dq.load([t0, c]), acc)
            if NEAR:
                acc = tl.dot(b2, near_for_dq.load([n0, c]), acc)
            dq.store([row, c], acc.to(tl.bfloat16))


@triton.jit
def window_keys(
    q, do, p_old, ds_old, p_new, ds_new, p_near, ds_near, window_parts, near_parts, excess, flags, start,
    H: tl.constexpr, D: tl.constexpr, OLD: tl.constexpr, NEW: tl.constexpr, NEAR: tl.constexpr, ROWS: tl.constexpr,
    BN: tl.constexpr, BH: tl.constexpr, FULL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One block, BN columns: do^T P + q^T dS of its OLD + NEW key rows to `window_parts`, of entries to `near_parts`.

    Transposed: the 16 and 32 keys are the columns of the product; as its rows they would be too few for the tensor
    cores. FULL as in `window_scores`; otherwise the rows that have an `excess` are mended, see `rounding`.
    """
    pid = tl.program_id(0)
    block = pid // (D // BN)
    c = pid % (D // BN) * BN
    a0 = tl.zeros((BN, OLD), tl.float32)
    a1 = tl.zeros((BN, NEW), tl.float32)
    if NEAR:
        a2 = tl.zeros((BN, NEAR), tl.float32)
    first = block * (NEW * H)
    last = first + NEW * H
    for r in tl.range(first, last, BH, num_stages=STAGES):
        g = do.load([start * H + r, c]).T
        a = q.load([start * H + r, c]).T
        a0 = tl.dot(g, p_old.load([r, 0]), a0)
        a1 = tl.dot(g, p_new.load([r, 0]), a1)
        if NEAR:
            a2 = tl.dot(g, p_near.load([r, 0]), a2)
        a0 = tl.dot(a, ds_old.load([r, 0]), a0)
        a1 = tl.dot(a, ds_new.load([r, 0]), a1)
        if NEAR:
            a2 = tl.dot(a, ds_near.load([r, 0]), a2)
    if not FULL:  # noqa: SIM102 (compiled, the second is not for all)
        if flagged(flags, first, last, ROWS, NEW * H // ROWS):
            for r in tl.range(first, last, BH, num_stages=1):
                if tl.load(flags + r // ROWS) != 0:
                    a0 = keys_mended(a0, q, p_old, excess, r, start * H + r, c, 0, BH)
                    a1 = keys_mended(a1, q, p_new, excess, r, start * H + r, c, 0, BH)
    column = c + tl.arange(0, BN)
    at = window_parts + block.to(tl.int64) * ((OLD + NEW) * D)
    tl.store(at + tl.arange(0, OLD)[:, None] * D + column[None, :], a0.T)
    tl.store(at + (OLD + tl.arange(0, NEW))[:, None] * D + column[None, :], a1.T)
    if NEAR:
        tl.store(near_parts + block.to(tl.int64) * (NEAR * D) + tl.arange(0, NEAR)[:, None] * D + column[None, :], a2.T)
