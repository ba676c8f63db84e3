"""The kernels of the grouped products: rows times the matrix of their expert, and the products of columns that give
the matrices' gradients."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
# The language of kernels has types of its own.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from undertow.ops.triton.attention.descriptors import described
from undertow.ops.triton.attention.tiles import dividing
from undertow.ops.triton.grouped.ragged import WIDTH, Table, in_turn, place, ragged
from undertow.ops.triton.grouped.tiles import Tiles, programs


@triton.jit
def _half(x):
    """Left and right columns of a tile."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def grouped_product(
    rows, weight, out, tiles, spans, experts, width, depth,
    TURNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Tiles of `rows [N, depth]` times the expert's matrix, `[width, depth]`, or `[depth, width]` if TURNED."""
    across = tl.cdiv(width, BN)
    total = tl.load(spans + 2 * experts) * across
    for t in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLATTEN):
        entry = tiles + (t // across) * WIDTH
        expert = tl.load(entry)
        first = tl.load(entry + 1)
        down = tl.load(entry + 2)
        start = tl.load(entry + 3)
        size = tl.load(entry + 4)
        row, column = in_turn(t - first * across, down, across, GROUP)
        row *= BM
        column *= BN
        c0, c1, c2 = place(start, size, row)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, depth, BK):
            # Zeros behind the last row: on other rows the chip would spend its power, and so its clock.
            a = tl.reshape(rows.load([c0, c1, c2, k]), (BM, BK))
            if TURNED:
                b = weight.load([expert * depth + k, column])
            else:
                b = weight.load([expert * width + column, k]).T
            acc = tl.dot(a, b, acc)
        if PARTS == 1:
            out.store([c0, c1, c2, column], tl.reshape(acc.to(tl.bfloat16), (1, 1, BM, BN)))
        else:
            left, right = _half(acc)
            out.store([c0, c1, c2, column], tl.reshape(left.to(tl.bfloat16), (1, 1, BM, BN // 2)))
            out.store([c0, c1, c2, column + BN // 2], tl.reshape(right.to(tl.bfloat16), (1, 1, BM, BN // 2)))


@triton.jit
def _write(out, expert, row, column, part, ADD: tl.constexpr):
    """A part of a tile over an expert's matrix, or added to it."""
    tile = tl.reshape(part, (1, part.shape[0], part.shape[1]))
    if ADD:
        tile += out.load([expert, row, column])
        out.store([expert, row, column], tile)
    else:
        out.store([expert, row, column], tile.to(tl.bfloat16))


@triton.jit
def _finish(out, expert, row, column, acc, PARTS: tl.constexpr, ADD: tl.constexpr):
    """A tile into an expert's matrix, in 1, 2 or 4 parts."""
    width: tl.constexpr = acc.shape[1] // PARTS
    if PARTS == 1:
        _write(out, expert, row, column, acc, ADD)
    else:
        left, right = _half(acc)
        if PARTS == 2:
            _write(out, expert, row, column, left, ADD)
            _write(out, expert, row, column + width, right, ADD)
        else:
            one, two = _half(left)
            _write(out, expert, row, column, one, ADD)
            _write(out, expert, row, column + width, two, ADD)
            one, two = _half(right)
            _write(out, expert, row, column + 2 * width, one, ADD)
            _write(out, expert, row, column + 3 * width, two, ADD)


@triton.jit
def _steps(spans, experts, each, EXPERTS: tl.constexpr, BK: tl.constexpr):
    """Steps of all tiles of this program: `each` tiles an expert are shared out in turn."""
    e = tl.arange(0, EXPERTS)
    sizes = tl.load(spans + 2 * e + 1, e < experts, other=0)
    shift = tl.num_programs(0) - 1 - tl.program_id(0)
    tiles = ((e + 1) * each + shift) // tl.num_programs(0) - (e * each + shift) // tl.num_programs(0)
    return tl.sum(tl.where(e < experts, tiles * tl.maximum((sizes + BK - 1) // BK, 1), 0), 0)


@triton.jit
def grouped_outer(
    grad, rows, out, spans, experts, height, width,
    ADD: tl.constexpr, EXPERTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Tiles of each expert's `grad^T rows`, `[height, width]`, over that expert's rows alone.

    One loop of all steps of all tiles: the loads of the next tile begin before the last one is written. An expert
    without rows has a step that reads zeros.
    """
    down = tl.cdiv(height, BM)
    across = tl.cdiv(width, BN)
    each = down * across
    tile = tl.program_id(0) - tl.num_programs(0)
    expert, start, size, row, column, steps, step = 0, 0, 0, 0, 0, 0, -1
    acc = tl.zeros((BM, BN), tl.float32)
    # Which tile and step is next does not depend on the product before, so that loads can go ahead of it.
    for _ in tl.range(0, _steps(spans, experts, each, EXPERTS, BK)):
        step += 1
        if step == steps:
            tile += tl.num_programs(0)
            expert = tile // each
            start = tl.load(spans + 2 * expert)
            size = tl.load(spans + 2 * expert + 1)
            row, column = in_turn(tile % each, down, across, GROUP)
            row *= BM
            column *= BN
            steps = tl.maximum((size + BK - 1) // BK, 1)
            step = 0
        c0, c1, c2 = place(start, size, step * BK)
        g = tl.reshape(grad.load([c0, c1, c2, row]), (BK, BM))
        x = tl.reshape(rows.load([c0, c1, c2, column]), (BK, BN))
        acc = tl.dot(g.T, x, acc)
        if step == steps - 1:
            _finish(out, expert, row, column, acc, PARTS, ADD)
            acc = tl.zeros((BM, BN), tl.float32)


def _launched(tile: Tiles, *others: str) -> dict[str, int]:
    return {name: value for name, value in tile.items() if name not in ("PROGRAMS", *others)}


def product(rows: Tensor, weight: Tensor, order: Table, tile: Tiles, turned: bool) -> Tensor:
    """Rows `[N, K]` times `weight [E, O, K]` transposed -> `[N, O]`, or, if `turned`, rows `[N, O]` times it ->
    `[N, K]`."""
    experts, height, width = weight.shape
    depth, wide = (height, width) if turned else (width, height)
    # A step that passes the end of an expert's matrix would read the next one's.
    tile = {**tile, "BK": dividing(tile["BK"], depth)}
    out = torch.empty((len(rows), wide), dtype=rows.dtype, device=rows.device)
    sides = (tile["BK"], tile["BN"]) if turned else (tile["BN"], tile["BK"])
    grid = programs(rows.device, tile, order.most * triton.cdiv(wide, tile["BN"]))
    grouped_product[(grid,)](
        ragged(rows, tile["BM"], tile["BK"]), described(weight.view(-1, width), *sides),
        ragged(out, tile["BM"], tile["BN"] // tile["PARTS"]), *order, experts, wide, depth,
        TURNED=turned, **_launched(tile),
    )  # fmt: skip
    return out


def outer(grad: Tensor, rows: Tensor, order: Table, tile: Tiles, out: Tensor, add: bool) -> None:
    """`grad^T rows` of each expert, `[O, K]` from `[N, O]` and `[N, K]`, into `out [E, O, K]`: over it, or added."""
    experts, height, width = out.shape
    of_out = TensorDescriptor(
        out, list(out.shape), [height * width, width, 1], [1, tile["BM"], tile["BN"] // tile["PARTS"]]
    )
    grid = programs(grad.device, tile, experts * triton.cdiv(height, tile["BM"]) * triton.cdiv(width, tile["BN"]))
    grouped_outer[(grid,)](
        ragged(grad, tile["BK"], tile["BM"]), ragged(rows, tile["BK"], tile["BN"]), of_out, order.spans,
        experts, height, width, ADD=add, EXPERTS=triton.next_power_of_2(experts), **_launched(tile, "FLATTEN"),
    )  # fmt: skip
