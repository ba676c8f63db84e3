"""Products that are symmetric, of stacks of matrices: tiles of one triangle are computed and mirrored."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
# The language of kernels has types of its own.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from undertow.ops.triton.attention.descriptors import aligned, described
from undertow.ops.triton.optimizer.tiles import tiles

SMALLEST = 256
"""Rows from which on a triangle is much less than the square."""

FILLS = 1 << 23
"""Numbers of the products of a stack that keep a GPU busy; for fewer, libraries cut the sums too."""


@triton.jit
def symmetric_tile(
    rows, columns, gram, out, height, width, alpha, beta,
    ADDED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BM x BN of `alpha X X^T`, and `beta gram` more, of one matrix `X [height, width]` of a stack.

    `rows` and `columns` describe the stack, its matrices one below the other, in tiles for the left and the right
    operand. Squares of BN x BN on and below the diagonal are computed, and those below it stored mirrored too.
    """
    matrix = tl.program_id(1)
    square = tl.program_id(0) // (BN // BM)
    # The square's place in the triangle that is counted row by row.
    i = ((tl.sqrt(8.0 * square.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > square, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= square, i + 1, i)
    j = square - i * (i + 1) // 2
    top = i * BN + tl.program_id(0) % (BN // BM) * BM
    left = j * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, width, BK, num_stages=STAGES):
        a = rows.load([matrix * height + top, k])
        acc = tl.dot(a, columns.load([matrix * height + left, k]).T, acc)
    r = top + tl.arange(0, BM)
    c = left + tl.arange(0, BN)
    inside = (r < height)[:, None] & (c < height)[None, :]
    first = matrix.to(tl.int64) * height * height
    place = r[:, None] * height + c[None, :]
    if ADDED:
        acc = alpha * acc + beta * tl.load(gram + first + place, inside, other=0.0).to(tl.float32)
    value = acc.to(out.dtype.element_ty)
    tl.store(out + first + place, value, inside)
    if i != j:
        mirrored = c[:, None] * height + r[None, :]
        tl.store(out + first + mirrored, value.T, (c < height)[:, None] & (r < height)[None, :])


def refusal(x: Tensor) -> str | None:
    """Why the kernel does not serve a stack `x [N, a, b]`, or None if it does."""
    if x.dtype != torch.bfloat16:
        return f"matrices in {x.dtype}: the kernel serves bfloat16"
    if x.shape[-2] < SMALLEST or x.shape[-2] % 16 or x.shape[-1] % 16:
        return f"matrices {list(x.shape[-2:])}: the kernel serves multiples of 16, from {SMALLEST} rows on"
    if x.shape[0] * x.shape[1] ** 2 < FILLS or x.shape[0] > 65535:
        return f"{x.shape[0]} matrices: the kernel serves up to 65535, with {FILLS} numbers in their products"
    return None


def symmetric_product(x: Tensor, gram: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """`X X^T` of each matrix of `x [N, a, b]`, or `alpha X X^T + beta gram` with symmetric `gram [N, a, a]` -> `[N, a,
    a]`, summed in float32 and exactly symmetric."""
    x = aligned(x)
    count, height, width = x.shape
    out = torch.empty((count, height, height), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    tile, flat = tiles(x.device, "symmetric"), x.flatten(0, 1)
    side = triton.cdiv(height, tile["BN"])
    symmetric_tile[(side * (side + 1) // 2 * (tile["BN"] // tile["BM"]), count)](
        described(flat, tile["BM"], tile["BK"]), described(flat, tile["BN"], tile["BK"]), gram, out, height, width,
        alpha, beta, ADDED=gram is not None, **tile,
    )  # fmt: skip
    return out
