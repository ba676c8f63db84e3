"""The streams of a token as separate tiles, and sums of several numbers of a row."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def streams_at(x, stride, at, here, N: tl.constexpr):
    """N tiles `x[at + j stride]`, in their own type, 0 where not `here`."""
    found = ()
    for j in tl.static_range(N):
        found += (tl.load(x + j * stride + at, here, other=0.0),)
    return found


@triton.jit
def widened(xs, N: tl.constexpr):
    """The tiles in float32."""
    wide = ()
    for j in tl.static_range(N):
        wide += (xs[j].to(tl.float32),)
    return wide


@triton.jit
def by_eights(x, BD: tl.constexpr):
    """Sums of eight neighbours of `x [BD]`, which a thread has loaded: no exchange between threads."""
    return tl.sum(tl.reshape(x, (BD // 8, 8)), 1)


@triton.jit
def nothing(COUNT: tl.constexpr, SIZE: tl.constexpr):
    """COUNT sums `[SIZE]` that are still 0."""
    sums = ()
    for _ in tl.static_range(COUNT):
        sums += (tl.zeros((SIZE,), tl.float32),)
    return sums
