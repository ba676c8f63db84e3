"""Backward of chosen entries in the gather form: a token's rows are read where they lie, exactly those it chose."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import triton
import triton.language as tl

from undertow.ops.triton.attention.rounding import queries_mended
from undertow.ops.triton.attention.selection import row_read
from undertow.ops.triton.attention.window_forward import LOG2E


@triton.jit
def gather_scores(
    q, do, q_for_keys, do_for_keys, entries, rows, counts, ds, ds_rows, lse, delta, sums, stride,
    dentries, parts, start, scale,
    SLOTS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
    BN: tl.constexpr, ATOMIC: tl.constexpr, STAGES: tl.constexpr, STAGES2: tl.constexpr,
):  # fmt: skip
    """One token and BK of its slots: dS to `ds` (`ds_rows` is the same memory), sums of dS / scale, P^T do + dS^T q.

    The last, of the entries, is added to `dentries` by float32 atomics (ATOMIC), or put into `parts`, bf16, one row
    a slot. `q_for_keys` and `do_for_keys` describe q and do for the last product. M is at least 16 rows, of which H are
    the token's.
    """
    pid = tl.program_id(0)
    token = pid // (SLOTS // BK)
    k0 = pid % (SLOTS // BK) * BK
    if k0 < tl.load(counts + token):
        row = (start + token) * H
        place = rows + token.to(tl.int64) * SLOTS
        picked = tl.load(place + k0 + tl.arange(0, BK))
        on = picked >= 0
        n = row_read(picked)
        m = tl.arange(0, M)
        s = tl.zeros((M, BK), tl.float32)
        d = tl.zeros((M, BK), tl.float32)
        for c in tl.range(0, D, BD, num_stages=STAGES):
            k = tl.load(entries + n[:, None] * D + c + tl.arange(0, BD)[None, :]).T
            s = tl.dot(q.load([row, c]), k, s)
            d = tl.dot(do.load([row, c]), k, d)
        row_lse = tl.load(lse + row + m, m < H, other=0.0) * LOG2E
        row_delta = tl.load(delta + row + m, m < H, other=0.0)
        both = on[None, :] & (m < H)[:, None]
        p = tl.where(both, tl.exp2(s * (scale * LOG2E) - row_lse[:, None]), 0.0)
        d = p * (d - row_delta[:, None])
        tl.store(sums + k0 // BK * stride + token * H + m, tl.sum(d, 1), m < H)
        e = (d * scale).to(tl.bfloat16)
        if M == H:
            ds.store([token * H, k0], e)
        else:
            at = ds_rows + (token.to(tl.int64) * H + m)[:, None] * SLOTS + k0 + tl.arange(0, BK)[None, :]
            tl.store(at, e, (m < H)[:, None])
        pt = p.to(tl.bfloat16).T
        et = e.T
        for c in tl.range(0, D, BN, num_stages=STAGES2):
            acc = tl.dot(pt, do_for_keys.load([row, c]))
            acc = tl.dot(et, q_for_keys.load([row, c]), acc)
            if ATOMIC:
                where = n[:, None] * D + c + tl.arange(0, BN)[None, :]
                tl.atomic_add(dentries + where, acc, mask=on[:, None], sem="relaxed")
            else:
                slot = token.to(tl.int64) * SLOTS + k0 + tl.arange(0, BK)
                where = slot[:, None] * D + c + tl.arange(0, BN)[None, :]
                tl.store(parts + where, acc.to(tl.bfloat16), mask=on[:, None])


@triton.jit
def gather_queries(
    ds_old, ds_new, ds, old, new, entries, rows, counts, dq, dq_rows, o, rests, sizes, start, scale,
    SLOTS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, OLD: tl.constexpr, NEW: tl.constexpr, M: tl.constexpr,
    BK: tl.constexpr, BO: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One token, BN columns: dq = dS K over the window's fixed columns and the chosen entries (`dq_rows` is `dq`)."""
    c = tl.program_id(0) * BN
    token = tl.num_programs(1) - 1 - tl.program_id(1)
    r0 = token * H
    t0 = start + token // NEW * NEW
    acc = tl.zeros((M, BN), tl.float32)
    count = tl.load(counts + token)
    for k in tl.range(0, count, BK, num_stages=STAGES):
        n = row_read(tl.load(rows + token.to(tl.int64) * SLOTS + k + tl.arange(0, BK)))
        acc = tl.dot(ds.load([r0, k]), tl.load(entries + n[:, None] * D + c + tl.arange(0, BN)[None, :]), acc)
    for k in tl.range(0, OLD, BO, num_stages=STAGES):
        acc = tl.dot(ds_old.load([r0, k]), old.load([t0 - OLD + k, c]), acc)
    acc = tl.dot(ds_new.load([r0, 0]), new.load([t0, c]), acc)
    m = tl.arange(0, M)
    row = start * H + r0
    acc = queries_mended(acc, o, row, m < H, c, rests, sizes, scale, M, D, BN)
    if M == H:
        dq.store([row, c], acc.to(tl.bfloat16))
    else:
        at = dq_rows + (row + m).to(tl.int64)[:, None] * D + c + tl.arange(0, BN)[None, :]
        tl.store(at, acc.to(tl.bfloat16), (m < H)[:, None])


@triton.jit
def gather_mended(
    q, q_for_keys, entries, rows, counts, lse, excess, flags, dentries, parts, start, scale,
    SLOTS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, BK: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """One token, if its rows are flagged: -P^T q excess, of its slots, to where `gather_scores` has put theirs."""
    token = tl.program_id(0)
    if tl.load(flags + token * H // ROWS) != 0:
        row = (start + token) * H
        place = rows + token.to(tl.int64) * SLOTS
        m = tl.arange(0, M)
        factor = tl.load(excess + token * H + m, m < H, other=0.0)
        row_lse = tl.load(lse + row + m, m < H, other=0.0) * LOG2E
        for k0 in tl.range(0, tl.load(counts + token), BK, num_stages=1):
            picked = tl.load(place + k0 + tl.arange(0, BK))
            on = picked >= 0
            n = row_read(picked)
            s = tl.zeros((M, BK), tl.float32)
            for c in tl.range(0, D, BD, num_stages=1):
                k = tl.load(entries + n[:, None] * D + c + tl.arange(0, BD)[None, :]).T
                s = tl.dot(q.load([row, c]), k, s)
            both = on[None, :] & (m < H)[:, None]
            p = tl.where(both, tl.exp2(s * (scale * LOG2E) - row_lse[:, None]), 0.0)
            e = (p * -factor[:, None]).to(tl.bfloat16).T
            for c in tl.range(0, D, BN, num_stages=1):
                acc = tl.dot(e, q_for_keys.load([row, c]))
                if ATOMIC:
                    where = n[:, None] * D + c + tl.arange(0, BN)[None, :]
                    tl.atomic_add(dentries + where, acc, mask=on[:, None], sem="relaxed")
                else:
                    slot = token.to(tl.int64) * SLOTS + k0 + tl.arange(0, BK)
                    at = parts + slot[:, None] * D + c + tl.arange(0, BN)[None, :]
                    acc += tl.load(at, mask=on[:, None], other=0.0).to(tl.float32)
                    tl.store(at, acc.to(tl.bfloat16), mask=on[:, None])
