"""From scores and mass of a run: the divergence of each query, and its gradient by each score."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
# The language of kernels has types of its own.
from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = 1024
"""Columns of a row that a program takes at a time."""


@triton.jit
def _counted(chosen, n, visible, width, CHOSEN: tl.constexpr):
    """Which columns of the program's row count; a row of the table of those chosen has one column more."""
    seen = n < visible
    if CHOSEN:
        seen &= tl.load(chosen + tl.program_id(0).to(tl.int64) * (width + 1) + n, seen, other=0) != 0
    return seen


@triton.jit
def indexer_divergence(
    scores, mass, chosen, low, high, loss, total, normaliser, start, width,
    EPS: tl.constexpr, CHOSEN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One query: `sum t (log t - score + log_sum)`, `t = m / max(sum m, EPS)`, from sums over `m log m` and `m score`;
    beside it `sum m` and the scores' log-sum-exp."""
    token = start + tl.program_id(0)
    visible = tl.load(high + token) - tl.load(low + token)
    row = tl.program_id(0).to(tl.int64) * width
    entropy = tl.full((), 0.0, tl.float32)
    agreed = tl.full((), 0.0, tl.float32)
    gathered = tl.full((), 0.0, tl.float32)
    below = tl.full((), 0.0, tl.float32)
    most = tl.full((), float("-inf"), tl.float32)
    for c in range(0, visible, COLUMNS):
        n = c + tl.arange(0, COLUMNS)
        counted = _counted(chosen, n, visible, width, CHOSEN)
        m = tl.load(mass + row + n, counted, other=0.0)
        score = tl.load(scores + row + n, counted, other=float("-inf"))
        gathered += tl.sum(m, 0)
        entropy += tl.sum(m * tl.log(tl.where(m == 0.0, 1.0, m)), 0)
        agreed += tl.sum(m * tl.where(counted, score, 0.0), 0)
        new = tl.maximum(most, tl.max(score, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        below = below * tl.exp(most - base) + tl.sum(tl.exp(score - base), 0)
        most = new
    log_sum = tl.where(below > 0.0, most + tl.log(tl.where(below > 0.0, below, 1.0)), 0.0)
    floored = tl.where(gathered < EPS, EPS, gathered)
    kl = (entropy - agreed + gathered * (log_sum - tl.log(floored))) / floored
    tl.store(loss + token, kl)
    tl.store(total + token, gathered)
    tl.store(normaliser + token, log_sum)


@triton.jit
def indexer_slopes(
    scores, mass, chosen, low, high, pull, push, normaliser, start, width,
    CHOSEN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """COLUMNS of one query: `pull exp(score - log_sum) - push m` into the place of the scores, 0 where none counts."""
    token = start + tl.program_id(0)
    visible = tl.load(high + token) - tl.load(low + token)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if tl.program_id(1) * COLUMNS < visible:
        row = tl.program_id(0).to(tl.int64) * width
        counted = _counted(chosen, n, visible, width, CHOSEN)
        score = tl.load(scores + row + n, counted, other=0.0)
        m = tl.load(mass + row + n, counted, other=0.0)
        share = tl.exp(score - tl.load(normaliser + token))
        slope = share * tl.load(pull + token) - m * tl.load(push + token)
        tl.store(scores + row + n, tl.where(counted, slope, 0.0), n < visible)
