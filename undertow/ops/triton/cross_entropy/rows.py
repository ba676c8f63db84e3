"""Everything between the products of linear cross-entropy: a program takes one row of logits.

It goes through the row once for the log-normaliser, with a running softmax of each lane, and back from the end for the
gradients, since the end is what the cache still holds.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import triton
import triton.language as tl

from undertow.ops.reference.cross_entropy import IGNORE

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.0e38)
"""The maximum of nothing: a finite number, from which -inf can be taken."""

_IGNORE = tl.constexpr(IGNORE)


@triton.jit
def _log_sum_exp(x, vocabulary, DEEP: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr):
    lane = tl.arange(0, DEEP)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    highest = tl.full((LANES,), LOWEST, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    for c in tl.range(0, vocabulary, DEEP * LANES, num_stages=STAGES):
        at = c + lane
        logit = tl.load(x + at, at < vocabulary, other=-float("inf")).to(tl.float32)
        new = tl.maximum(highest, tl.max(logit, 0))
        total = total * tl.exp2((highest - new) * LOG2E) + tl.sum(tl.exp2((logit - new[None, :]) * LOG2E), 0)
        highest = new
    top = tl.max(highest, 0)
    return top + tl.log2(tl.sum(total * tl.exp2((highest - top) * LOG2E), 0)) / LOG2E


@triton.jit
def cross_entropy_rows(
    logits, labels, losses, normalisers, slopes, logits_stride, slopes_stride, vocabulary, z_loss,
    KNOWN: tl.constexpr, LEARNS: tl.constexpr, DEEP: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Loss, log-normaliser and slopes of one row, the gradients of its loss by its logits; all 0 if its label is
    ignored.

    KNOWN: the log-normaliser is read, not made. LEARNS: slopes are made. A label outside the vocabulary gives a loss of
    NaN. Slopes stay as they are, whatever the loss is multiplied by: so that of most labels, near -1, is hardly rounded
    in bfloat16.
    """
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * logits_stride
    label = tl.load(labels + row)
    counts = label != _IGNORE
    lse = tl.full((), 0.0, tl.float32)
    if KNOWN:
        lse = tl.load(normalisers + row)
    else:
        loss = tl.full((), 0.0, tl.float32)
        if counts:
            lse = _log_sum_exp(x, vocabulary, DEEP, LANES, STAGES)
            inside = (label >= 0) & (label < vocabulary)
            loss = lse - tl.load(x + label, inside, other=float("nan")).to(tl.float32) + z_loss * lse * lse
        tl.store(losses + row, loss)
        tl.store(normalisers + row, lse)
    if LEARNS:
        out = slopes + row * slopes_stride
        share = 1.0 + 2.0 * z_loss * lse
        column = tl.arange(0, DEEP * LANES)
        last = tl.cdiv(vocabulary, DEEP * LANES) - 1
        read = tl.where(counts, vocabulary, 0)
        for i in tl.range(0, last + 1, num_stages=STAGES):
            at = (last - i) * (DEEP * LANES) + column
            logit = tl.load(x + at, at < read, other=0.0).to(tl.float32)
            slope = tl.exp2((logit - lse) * LOG2E) * share
            slope = tl.where(at == label, slope - 1.0, slope)
            slope = tl.where(at < read, slope, 0.0)
            tl.store(out + at, slope.to(out.dtype.element_ty), at < vocabulary)


@triton.jit
def scale_unless_one(x, factor, count, BLOCK: tl.constexpr):
    """`x [count]` times the number at `factor`, in place; nothing is read or written if that is 1."""
    by = tl.load(factor)
    if by != 1.0:
        first = tl.program_id(0).to(tl.int64) * BLOCK
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for i in tl.range(0, tl.cdiv(tl.maximum(count - first, 0), step).to(tl.int32)):
            at = first + i * step + tl.arange(0, BLOCK)
            value = tl.load(x + at, at < count, other=0.0).to(tl.float32) * by
            tl.store(x + at, value.to(x.dtype.element_ty), at < count)
