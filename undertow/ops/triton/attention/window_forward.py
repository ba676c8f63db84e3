"""Forward in the near form: all keys of a token in one tile, so that its softmax needs no second look.

A block of 16 tokens shares its keys: the rows before the block ("old"), its own ("new"), and a tile of entries.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
# The language of kernels has types of its own.
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def of_window(s0, s1, r, first, c2, OLD: tl.constexpr, NEW: tl.constexpr, WINDOW: tl.constexpr):
    """Scores of the old and the new rows in base 2, -inf where a token does not see them.

    A token, the `r`-th of its block, sees the keys from its document's first row on, the `first`-th of the block
    (negative before it), WINDOW of them, up to itself.
    """
    j = tl.arange(0, OLD)
    n = tl.arange(0, NEW)
    since = tl.maximum(first, r - WINDOW + 1)
    s0 = tl.where(j[None, :] >= (since + OLD)[:, None], s0 * c2, float("-inf"))
    s1 = tl.where((n[None, :] <= r[:, None]) & (n[None, :] >= since[:, None]), s1 * c2, float("-inf"))
    return s0, s1


@triton.jit
def sees(n0, low, high, token, inside, NEAR: tl.constexpr):
    """Which of the NEAR entries from `n0` on each row's token sees."""
    e = n0 + tl.arange(0, NEAR)
    lo = tl.load(low + token, inside, other=0)
    hi = tl.load(high + token, inside, other=0)
    return (e[None, :] >= lo[:, None]) & (e[None, :] < hi[:, None])


@triton.jit
def window_forward(
    q, old, new, near, old_value, new_value, near_value, o, lse, sink, begin, low, high,
    start, tokens, scale,
    H: tl.constexpr, D: tl.constexpr, OLD: tl.constexpr, NEW: tl.constexpr, NEAR: tl.constexpr, WINDOW: tl.constexpr,
    TOKENS: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, STAGES2: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of a slab that begins at token `start` and has `tokens`.

    `old`, `new`, `near` and the `_value`s describe the same keys for the two products; q, o and lse begin at the slab,
    the tables at the first token of all.
    """
    M: tl.constexpr = TOKENS * H
    pid = tl.program_id(0)
    row = pid * M
    own = pid * TOKENS // NEW * NEW
    t0 = start + own
    m = tl.arange(0, M)
    token = pid * TOKENS + m // H
    inside = token < tokens
    s0 = tl.zeros((M, OLD), tl.float32)
    s1 = tl.zeros((M, NEW), tl.float32)
    if NEAR:
        n0 = tl.load(low + t0)
        s2 = tl.zeros((M, NEAR), tl.float32)
    for c in tl.range(0, D, BD, num_stages=STAGES):
        a = q.load([row, c])
        s0 = tl.dot(a, old.load([t0 - OLD, c]).T, s0)
        s1 = tl.dot(a, new.load([t0, c]).T, s1)
        if NEAR:
            s2 = tl.dot(a, near.load([n0, c]).T, s2)
    c2 = scale * LOG2E
    r = token - own
    first = tl.load(begin + start + token, inside, other=0) - t0
    z = tl.load(sink + m % H) * LOG2E
    s0, s1 = of_window(s0, s1, r, first, c2, OLD, NEW, WINDOW)
    x = tl.maximum(tl.maximum(tl.max(s0, 1), tl.max(s1, 1)), z)
    if NEAR:
        s2 = tl.where(sees(n0, low + start, high + start, token, inside, NEAR), s2 * c2, float("-inf"))
        x = tl.maximum(x, tl.max(s2, 1))
    s0 = tl.exp2(s0 - x[:, None])
    s1 = tl.exp2(s1 - x[:, None])
    total = tl.exp2(z - x) + tl.sum(s0, 1) + tl.sum(s1, 1)
    if NEAR:
        s2 = tl.exp2(s2 - x[:, None])
        total += tl.sum(s2, 1)
    tl.store(lse + row + m, (x + tl.log2(total)) / LOG2E, inside)
    total = 1 / total
    p0 = (s0 * total[:, None]).to(tl.bfloat16)
    p1 = (s1 * total[:, None]).to(tl.bfloat16)
    if NEAR:
        p2 = (s2 * total[:, None]).to(tl.bfloat16)
    for c in tl.range(0, D, BN, num_stages=STAGES2):
        acc = tl.dot(p0, old_value.load([t0 - OLD, c]))
        acc = tl.dot(p1, new_value.load([t0, c]), acc)
        if NEAR:
            acc = tl.dot(p2, near_value.load([n0, c]), acc)
        o.store([row, c], acc.to(tl.bfloat16))
