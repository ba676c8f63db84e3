"""Backward of the window: a head's probabilities and their slopes are written once, later passes only multiply.

Tokens go in blocks of `BT` that share the key rows `[t0 - W, t0)` ("old") and `[t0, t0 + BT)` ("new"), and in the near
form `NEAR` entries from the first that the block sees. Masks zero what a token may not see, so that P and dS have fixed
columns and nothing after needs a mask. Rows are token x head, counted from the slab's first token in what is spilled.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def window_scores(
    q, do, o, dop, kvo, kvn, kvp, kvo2, kvn2, kvp2, dq, po, so, pn, sn, pp, sp,
    begin, low, high, lse, delta, size, sink, gs, start, tokens, scale,
    WINDOW: tl.constexpr, H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, NEAR: tl.constexpr,
    M: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, FULL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """M rows: P and dS of the window (and of `NEAR` entries), and each row's share of the sink's gradient in `gs`.

    FULL: these are all keys, so that delta = rowsum(P dP), `o` is not read and dq is finished here. Otherwise
    delta = rowsum(o do), kept for the entries with `size` = rowsum(o o), and `gs` is rowsum(P (dP - delta)) of the
    window: that o is rounded would show in the gradients of sinks and of some rows of q, so they are mended in the end
    by the sums over all keys.
    """
    r0 = tl.program_id(0) * M
    row = start * H + r0
    t0 = start + r0 // (BT * H) * BT
    m = tl.arange(0, M)
    tok = start + (r0 + m) // H
    here = tok < tokens
    s0 = tl.zeros((M, W), tl.float32)
    d0 = tl.zeros((M, W), tl.float32)
    s1 = tl.zeros((M, BT), tl.float32)
    d1 = tl.zeros((M, BT), tl.float32)
    if NEAR:
        first = tl.load(low + t0)
        s2 = tl.zeros((M, NEAR), tl.float32)
        d2 = tl.zeros((M, NEAR), tl.float32)
    if not FULL:
        # `do` is read again here on purpose. Taken from the tile below (a load that an asynchronous product and the
        # registers use) it would get one buffer too few from Triton 3.6, to be overwritten under the product.
        x = tl.zeros((M,), tl.float32)
        y = tl.zeros((M,), tl.float32)
        f = (row + m).to(tl.int64)[:, None] * D + tl.arange(0, BX)[None, :]
        for c in tl.range(0, D, BX, num_stages=1):
            out = tl.load(o + f + c, here[:, None], other=0.0).to(tl.float32)
            x += tl.sum(out * tl.load(dop + f + c, here[:, None], other=0.0).to(tl.float32), 1)
            y += tl.sum(out * out, 1)
    for c in tl.range(0, D, BD, num_stages=STAGES):
        a = q.load([row, c])
        b = do.load([row, c])
        ko = kvo.load([t0 - W, c])
        kn = kvn.load([t0, c])
        s0 = tl.dot(a, ko.T, s0)
        d0 = tl.dot(b, ko.T, d0)
        s1 = tl.dot(a, kn.T, s1)
        d1 = tl.dot(b, kn.T, d1)
        if NEAR:
            kp = kvp.load([first, c])
            s2 = tl.dot(a, kp.T, s2)
            d2 = tl.dot(b, kp.T, d2)
    c2 = scale * LOG2E
    z = tl.load(lse + row + m, here, other=0.0) * LOG2E
    # Rows beyond the last token see nothing.
    own = tl.load(begin + tok, here, other=1 << 30)
    r = tok - t0
    j = tl.arange(0, W)
    n = tl.arange(0, BT)
    on = (t0 - W + j[None, :] >= own[:, None]) & (r[:, None] + W - j[None, :] < WINDOW)
    p0 = tl.where(on, tl.exp2(s0 * c2 - z[:, None]), 0.0)
    on = (t0 + n[None, :] >= own[:, None]) & (n[None, :] <= r[:, None]) & (r[:, None] - n[None, :] < WINDOW)
    p1 = tl.where(on, tl.exp2(s1 * c2 - z[:, None]), 0.0)
    if NEAR:
        v = first + tl.arange(0, NEAR)
        lo = tl.load(low + tok, here, other=0)
        hi = tl.load(high + tok, here, other=0)
        on = (v[None, :] >= lo[:, None]) & (v[None, :] < hi[:, None])
        p2 = tl.where(on, tl.exp2(s2 * c2 - z[:, None]), 0.0)
    if FULL:
        x = tl.sum(p0 * d0, 1) + tl.sum(p1 * d1, 1)
        if NEAR:
            x += tl.sum(p2 * d2, 1)
        tl.store(gs + row + m, tl.exp2(tl.load(sink + (r0 + m) % H) * LOG2E - z) * x, here)
    d0 = p0 * (d0 - x[:, None])
    d1 = p1 * (d1 - x[:, None])
    if not FULL:
        tl.store(delta + row + m, x, here)
        tl.store(size + row + m, y, here)
        tl.store(gs + row + m, tl.sum(d0, 1) + tl.sum(d1, 1), here)
    e0 = (d0 * scale).to(tl.bfloat16)
    e1 = (d1 * scale).to(tl.bfloat16)
    po.store([r0, 0], p0.to(tl.bfloat16))
    pn.store([r0, 0], p1.to(tl.bfloat16))
    so.store([r0, 0], e0)
    sn.store([r0, 0], e1)
    if NEAR:
        e2 = (p2 * (d2 - x[:, None]) * scale).to(tl.bfloat16)
        pp.store([r0, 0], p2.to(tl.bfloat16))
        sp.store([r0, 0], e2)
    if FULL:
        for c in tl.range(0, D, BN, num_stages=2):
            acc = tl.dot(e0, kvo2.load([t0 - W, c]))
            acc = tl.dot(e1, kvn2.load([t0, c]), acc)
            if NEAR:
                acc = tl.dot(e2, kvp2.load([first, c]), acc)
            dq.store([row, c], acc.to(tl.bfloat16))


@triton.jit
def of_unrounded(acc, o, row, inside, c, rest, size, scale, D: tl.constexpr, BN: tl.constexpr):
    """dq for the delta of the unrounded o: less `rest` = rowsum(P dP) - rowsum(o do) times o.

    Read only where it is more than 2^-9 of a row: where one key has nearly all the weight, so that dP - delta vanishes.
    """
    rest *= scale
    if tl.max((rest * rest * size * (BN / D) > 3.8e-6 * tl.sum(acc * acc, 1)).to(tl.int32), 0) != 0:
        at = o + row.to(tl.int64)[:, None] * D + c + tl.arange(0, BN)[None, :]
        acc -= rest[:, None] * tl.load(at, inside[:, None], other=0.0).to(tl.float32)
    return acc


@triton.jit
def window_keys(
    q, do, po, so, pn, sn, pp, sp, parts, near, start,
    H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, NEAR: tl.constexpr,
    BN: tl.constexpr, BH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One block and BN columns: do^T P + q^T dS for its W + BT key rows to `parts`, for its entries to `near`.

    Transposed: the 16 and 32 keys are the columns of the product; as its rows they would be too few for the tensor
    cores.
    """
    pid = tl.program_id(0)
    block = pid // (D // BN)
    c = pid % (D // BN) * BN
    a0 = tl.zeros((BN, W), tl.float32)
    a1 = tl.zeros((BN, BT), tl.float32)
    if NEAR:
        a2 = tl.zeros((BN, NEAR), tl.float32)
    for r in tl.range(block * BT * H, (block + 1) * BT * H, BH, num_stages=STAGES):
        g = do.load([start * H + r, c]).T
        f = q.load([start * H + r, c]).T
        a0 = tl.dot(g, po.load([r, 0]), a0)
        a1 = tl.dot(g, pn.load([r, 0]), a1)
        if NEAR:
            a2 = tl.dot(g, pp.load([r, 0]), a2)
        a0 = tl.dot(f, so.load([r, 0]), a0)
        a1 = tl.dot(f, sn.load([r, 0]), a1)
        if NEAR:
            a2 = tl.dot(f, sp.load([r, 0]), a2)
    x = c + tl.arange(0, BN)
    at = parts + block.to(tl.int64) * ((W + BT) * D)
    tl.store(at + tl.arange(0, W)[:, None] * D + x[None, :], a0.T)
    tl.store(at + (W + tl.arange(0, BT))[:, None] * D + x[None, :], a1.T)
    if NEAR:
        tl.store(near + block.to(tl.int64) * (NEAR * D) + tl.arange(0, NEAR)[:, None] * D + x[None, :], a2.T)
