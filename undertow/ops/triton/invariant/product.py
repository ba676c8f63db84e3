"""The kernel of the batch-invariant products.

An element of the result is summed from the first number of its row to the last, in float32, by one program. Nothing of
that order follows from how many rows there are.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
# The language of kernels has types of its own.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad
from triton.tools.tensor_descriptor import TensorDescriptor

from undertow.ops.triton.grouped.ragged import in_turn
from undertow.ops.triton.grouped.tiles import programs
from undertow.ops.triton.invariant.tiles import tiles

_BYTES = 16
"""What addresses and the bytes of a row are multiples of, for a descriptor."""


@triton.jit
def _write(out, group, row, column, part):
    out.store([group, row, column], tl.reshape(part.to(out.dtype), (1, part.shape[0], part.shape[1])))


@triton.jit
def _half(x):
    """Left and right columns of a tile."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


# Numbers of rows of their own would otherwise be compiled for: 1, and multiples of 16.
@triton.jit(do_not_specialize=["groups", "count", "width", "depth"])
def invariant_product(
    rows, weight, out, groups, count, width, depth,
    TURNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Tiles of `rows [groups, count, depth]` times `weight [groups, width, depth]`, each group with its own."""
    down = tl.cdiv(count, BM)
    across = tl.cdiv(width, BN)
    each = down * across
    for t in tl.range(tl.program_id(0), groups * each, tl.num_programs(0), flatten=FLATTEN):
        group = t // each
        row, column = in_turn(t % each, down, across, GROUP)
        row *= BM
        column *= BN
        if TURNED:
            acc = tl.zeros((BN, BM), tl.float32)
        else:
            acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, depth, BK):
            a = tl.reshape(rows.load([group, row, k]), (BM, BK))
            b = tl.reshape(weight.load([group, column, k]), (BN, BK))
            if TURNED:
                acc = tl.dot(b, a.T, acc)
            else:
                acc = tl.dot(a, b.T, acc)
        if TURNED:
            _write(out, group, row, column, acc.T)
        elif PARTS == 1:
            _write(out, group, row, column, acc)
        else:
            left, right = _half(acc)
            if PARTS == 2:
                _write(out, group, row, column, left)
                _write(out, group, row, column + BN // 2, right)
            else:
                one, two = _half(left)
                _write(out, group, row, column, one)
                _write(out, group, row, column + BN // 4, two)
                one, two = _half(right)
                _write(out, group, row, column + BN // 2, one)
                _write(out, group, row, column + BN // 4 * 3, two)


def _readable(x: Tensor) -> Tensor:
    """`x [g, N, K]` as a descriptor can name it, copied only if it is not: a row may then end with zeros."""
    step = _BYTES // x.element_size()
    if missing := -x.shape[2] % step:
        return pad(x, (0, missing))
    sides = zip(x.shape[:2], x.stride()[:2], strict=True)
    steps = all(size < 2 or (stride > 0 and stride % step == 0) for size, stride in sides)
    if steps and x.stride(2) == 1 and x.data_ptr() % _BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _described(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """`x [g, M, N]` in tiles of one group; zero where a tile passes the edge of a group."""
    # Of a side of one torch calls any stride contiguous.
    step = _BYTES // x.element_size()
    strides = [step if size < 2 else stride for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, rows, columns])


def product(rows: Tensor, weight: Tensor, out: Tensor) -> None:
    """`out [g, M, N]` becomes `rows [g, M, K]` times `weight [g, N, K]` transposed, group by group, summed in float32.

    Factors are bfloat16, `out` that or float32. Rows of `out` begin at multiples of 16 bytes.
    """
    if out.numel() == 0:
        return
    rows, weight = _readable(rows), _readable(weight)
    (groups, count, depth), width = rows.shape, weight.shape[1]
    tile = tiles(rows.device, groups, count, width)
    many = groups * triton.cdiv(count, tile["BM"]) * triton.cdiv(width, tile["BN"])
    launched = {name: value for name, value in tile.items() if name not in ("ROWS", "PROGRAMS")}
    invariant_product[(programs(rows.device, tile, many),)](
        _described(rows, tile["BM"], tile["BK"]), _described(weight, tile["BN"], tile["BK"]),
        _described(out, tile["BM"], tile["BN"] // tile["PARTS"]), groups, count, width, depth, **launched,
    )  # fmt: skip


def product_of(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`x [T, g, K]` times `weight [g, O, K]` transposed, group by group -> `[T, g, O]` of `dtype`, contiguous."""
    (tokens, groups, _), width = x.shape, weight.shape[1]
    step = _BYTES // dtype.itemsize
    out = torch.empty((tokens, groups, -(-width // step) * step), dtype=dtype, device=x.device)[:, :, :width]
    product(x.transpose(0, 1), weight, out.transpose(0, 1))
    return out.contiguous()
