"""Sinkhorn's iteration on the matrices of several tokens, in registers, and the way back along it."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """Logistic function: 0 where `exp` overflows."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softmax(logits):
    """Over the last axis of `[tokens, N, N]`."""
    exp = tl.exp(logits - tl.max(logits, 2, keep_dims=True))
    return exp / tl.sum(exp, 2, keep_dims=True)


@triton.jit
def doubly_stochastic(logits, eps, ITERATIONS: tl.constexpr):
    """Matrices `[tokens, N, N]` of their logits: `undertow.ops.reference.hyper.sinkhorn`."""
    m = _softmax(logits) + eps
    for step in tl.static_range(2 * ITERATIONS - 1):
        m = m / (tl.sum(m, 1 + step % 2, keep_dims=True) + eps)
    return m


@triton.jit
def back(logits, grad, eps, ITERATIONS: tl.constexpr):
    """Gradient of the logits from that of the matrices.

    Of the steps only the sums are kept: the matrix before a step is that after it times the sum.
    """
    soft = _softmax(logits)
    m = soft + eps
    totals = ()
    for step in tl.static_range(2 * ITERATIONS - 1):
        total = tl.sum(m, 1 + step % 2, keep_dims=True) + eps
        m = m / total
        totals += (total,)
    for step in tl.static_range(2 * ITERATIONS - 2, -1, -1):
        grad = (grad - tl.sum(grad * m, 1 + step % 2, keep_dims=True)) / totals[step]
        m = m * totals[step]
    return soft * (grad - tl.sum(grad * soft, 2, keep_dims=True))
