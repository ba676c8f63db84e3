"""Backward of chosen entries in the gather form: a token's rows are read where they lie, exactly those it chose."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import triton
import triton.language as tl

from undertow.ops.triton.attention.window_backward import LOG2E, of_unrounded


@triton.jit
def gather_scores(
    q, do, q2, do2, kp, rows, counts, sp, spp, lse, delta, sums, stride, dkp, parts, start, scale,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
    BN: tl.constexpr, ATOMIC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One token and BK of its slots: dS to `sp` (`spp` is the same memory), sums of dS / scale, P^T do + dS^T q.

    The last, of the entries, is added to `dkp` by float32 atomics (ATOMIC), or put into `parts`, bf16, one row
    a slot. M is at least 16 rows, of which H are the token's.
    """
    pid = tl.program_id(0)
    tok = pid // (K // BK)
    k0 = pid % (K // BK) * BK
    if k0 < tl.load(counts + tok):
        row = (start + tok) * H
        place = rows + tok.to(tl.int64) * K + k0
        chosen = tl.load(place + tl.arange(0, BK))
        on = chosen >= 0
        key = tl.where(on, chosen, 0)
        m = tl.arange(0, M)
        s = tl.zeros((M, BK), tl.float32)
        d = tl.zeros((M, BK), tl.float32)
        for c in tl.range(0, D, BD, num_stages=STAGES):
            k = tl.load(kp + key[:, None] * D + c + tl.arange(0, BD)[None, :]).T
            s = tl.dot(q.load([row, c]), k, s)
            d = tl.dot(do.load([row, c]), k, d)
        z = tl.load(lse + row + m, m < H, other=0.0) * LOG2E
        x = tl.load(delta + row + m, m < H, other=0.0)
        both = on[None, :] & (m < H)[:, None]
        p = tl.where(both, tl.exp2(s * (scale * LOG2E) - z[:, None]), 0.0)
        d = p * (d - x[:, None])
        tl.store(sums + k0 // BK * stride + tok * H + m, tl.sum(d, 1), m < H)
        e = (d * scale).to(tl.bfloat16)
        if M == H:
            sp.store([tok * H, k0], e)
        else:
            at = spp + (tok.to(tl.int64) * H + m)[:, None] * K + k0 + tl.arange(0, BK)[None, :]
            tl.store(at, e, (m < H)[:, None])
        pt = p.to(tl.bfloat16).T
        et = e.T
        for c in tl.range(0, D, BN, num_stages=2):
            acc = tl.dot(pt, do2.load([row, c]))
            acc = tl.dot(et, q2.load([row, c]), acc)
            if ATOMIC:
                where = key[:, None] * D + c + tl.arange(0, BN)[None, :]
                tl.atomic_add(dkp + where, acc, mask=on[:, None], sem="relaxed")
            else:
                slot = tok.to(tl.int64) * K + k0 + tl.arange(0, BK)
                where = slot[:, None] * D + c + tl.arange(0, BN)[None, :]
                tl.store(parts + where, acc.to(tl.bfloat16), mask=on[:, None])


@triton.jit
def gather_queries(
    so, sn, sp, kvo, kvn, kp, rows, counts, dq, dqp, o, lse, delta, size, sink, rests, gs, sums, stride, start, scale,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, M: tl.constexpr,
    TILE: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One token, BN columns: dq = dS K over the window's fixed columns and the chosen entries (`dqp` is `dq`).

    `rests` and the `sums` of each TILE of slots are rowsum(P (dP - delta)) of window and slots. The first columns'
    program makes `gs` of them.
    """
    c = tl.program_id(0) * BN
    tok = tl.num_programs(1) - 1 - tl.program_id(1)
    r0 = tok * H
    t0 = start + tok // BT * BT
    acc = tl.zeros((M, BN), tl.float32)
    count = tl.load(counts + tok)
    for k in tl.range(0, count, BK, num_stages=STAGES):
        chosen = tl.load(rows + tok.to(tl.int64) * K + k + tl.arange(0, BK))
        key = tl.where(chosen >= 0, chosen, 0)
        acc = tl.dot(sp.load([r0, k]), tl.load(kp + key[:, None] * D + c + tl.arange(0, BN)[None, :]), acc)
    for k in tl.range(0, W, BW, num_stages=STAGES):
        acc = tl.dot(so.load([r0, k]), kvo.load([t0 - W + k, c]), acc)
    acc = tl.dot(sn.load([r0, 0]), kvn.load([t0, c]), acc)
    m = tl.arange(0, M)
    own = m < H
    row = start * H + r0 + m
    x = tl.load(rests + row, own, other=0.0)
    for k in tl.range(0, tl.cdiv(count, TILE), num_stages=1):
        x += tl.load(sums + k * stride + r0 + m, own, other=0.0)
    share = tl.exp2((tl.load(sink + m, own, other=0.0) - tl.load(lse + row, own, other=0.0)) * LOG2E)
    # rowsum(P dP) = rowsum(P (dP - delta)) + rowsum(P) delta.
    old = tl.load(delta + row, own, other=0.0)
    rest = x - share * old
    acc = of_unrounded(acc, o, row, own, c, rest, tl.load(size + row, own, other=0.0), scale, D, BN)
    if c == 0:
        tl.store(gs + row, share * (rest + old), own)
    if M == H:
        dq.store([start * H + r0, c], acc.to(tl.bfloat16))
    else:
        at = dqp + (start * H + r0 + m).to(tl.int64)[:, None] * D + c + tl.arange(0, BN)[None, :]
        tl.store(at, acc.to(tl.bfloat16), (m < H)[:, None])
