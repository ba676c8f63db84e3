"""The kernel of products with quantised weights: codes are widened in registers on their way from memory.

A weight is read once, as bytes. FP8 codes are multiplied as they are, and each sum of 128 by the scale of its block;
MXFP4 codes take their scale before the product, since every row of the matrix has its own.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
# The language of kernels has types of its own.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from undertow.ops.triton.attention.tiles import dividing
from undertow.ops.triton.grouped.quantised_tiles import Tiles, multiprocessors
from undertow.ops.triton.grouped.ragged import WIDTH, Table, in_turn
from undertow.ops.triton.grouped.widening import widened_e2m1, widened_e4m3
from undertow.ops.triton.small_floats import power_of_two


@triton.jit
def _times(weight, rows, acc, TURNED: tl.constexpr):
    """`weight [BN, C]` and `rows [BM, C]`: `[BN, BM]` if TURNED, else `[BM, BN]`, added to `acc`."""
    if TURNED:
        acc = tl.dot(weight, rows.T, acc)
    else:
        acc = tl.dot(rows, weight.T, acc)
    return acc


@triton.jit
def _sum_of_e2m1(
    x_at, w_at, s_at, live, part, begin, end, acc,
    BY_PAIRS: tl.constexpr, BK: tl.constexpr, TURNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds steps of the product with MXFP4 weights; `part` numbers lie between the parts of the rows."""
    wide: tl.constexpr = BK // 4
    for step in tl.range(begin, end, num_stages=STAGES):
        words = tl.load(w_at + step * wide)
        told = tl.load(s_at + step * (BK // 32))
        x0 = tl.load(x_at + step * wide, live, other=0.0)
        x1 = tl.load(x_at + part + step * wide, live, other=0.0)
        x2 = tl.load(x_at + 2 * part + step * wide, live, other=0.0)
        x3 = tl.load(x_at + 3 * part + step * wide, live, other=0.0)
        w0, w1, w2, w3 = widened_e2m1(words, told, BY_PAIRS)
        acc = _times(w0, x0, acc, TURNED)
        acc = _times(w1, x1, acc, TURNED)
        acc = _times(w2, x2, acc, TURNED)
        acc = _times(w3, x3, acc, TURNED)
    if BY_PAIRS:
        acc *= 4294967296.0
    return acc


@triton.jit
def _sum_of_e4m3(
    x_at, w_at, s_at, live, begin, end, acc,
    UE8M0: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, BK: tl.constexpr, TURNED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Adds steps of the product with FP8 weights, each of them times the scale of its block."""
    # The last part may have no steps.
    told = tl.load(s_at + tl.minimum(begin, tl.maximum(end - 1, 0)) * BK // 128)
    for step in tl.range(begin, end, num_stages=STAGES):
        # Read a step before it is needed.
        next = tl.load(s_at + tl.minimum(step + 1, end - 1) * BK // 128)
        weight = widened_e4m3(tl.load(w_at + step * BK), FNUZ, HARDWARE)
        x = tl.load(x_at + step * BK, live, other=0.0)
        scale = power_of_two(told.to(tl.int32)) if UE8M0 else told
        acc += _times(weight, x, tl.zeros_like(acc), TURNED) * scale
        told = next
    return acc


@triton.jit(do_not_specialize=["experts", "count", "steps", "each"])
def quantised_product(
    rows, codes, scales, out, tiles, spans, experts, count, width, line, grid, steps, each,
    FP4: tl.constexpr, UE8M0: tl.constexpr, FNUZ: tl.constexpr, HARDWARE: tl.constexpr, BY_PAIRS: tl.constexpr,
    DENSE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    TURNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of `count` rows times their expert's matrix of `width` rows, over `each` of all `steps` of the sum, into
    part `program_id(1)` of `out [parts, count, width]`.

    FP8: `rows [count, line]`, `codes [E, width, line]` bytes, `grid` scales beside each other. MXFP4: `rows
    [4, count, line]`, where part p has the columns 4 i + p; `codes [E, width, line]` words of 16 bits.
    """
    across = tl.cdiv(width, BN)
    t = tl.program_id(0)
    if DENSE:
        expert, first, down, start, size = 0, 0, tl.cdiv(count, BM), 0, count
    else:
        # Tiles that are not there take no time.
        if t >= tl.load(spans + 2 * experts) * across:
            return
        entry = tiles + (t // across) * WIDTH
        expert, first, down = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        start, size = tl.load(entry + 3), tl.load(entry + 4)
    row, column = in_turn(t - first * across, down, across, GROUP)
    row *= BM
    column *= BN
    m = tl.arange(0, BM)
    live = (row + m < size)[:, None]
    n = tl.arange(0, BN)
    # Rows past the last of a matrix read that one, and are not written.
    inside = tl.minimum(column + n, width - 1)
    matrix = tl.full((), 0, tl.int64) + expert
    before = tl.full((), 0, tl.int64) + start + row
    whole = tl.full((), 0, tl.int64) + count
    wide: tl.constexpr = BK // 4 if FP4 else BK
    k = tl.arange(0, wide)
    x_at = rows + before * line + (m[:, None] * line + k[None, :])
    w_at = codes + matrix * width * line + (inside[:, None] * line + k[None, :])
    begin = tl.program_id(1) * each
    end = tl.minimum(begin + each, steps)
    acc = tl.zeros((BN, BM) if TURNED else (BM, BN), tl.float32)
    if FP4:
        s_at = scales + matrix * width * grid + (inside[:, None] * grid + tl.arange(0, BK // 32)[None, :])
        acc = _sum_of_e2m1(x_at, w_at, s_at, live, whole * line, begin, end, acc, BY_PAIRS, BK, TURNED, STAGES)
    else:
        s_at = scales + (matrix * tl.cdiv(width, 128) + column // 128) * grid
        acc = _sum_of_e4m3(x_at, w_at, s_at, live, begin, end, acc, UE8M0, FNUZ, HARDWARE, BK, TURNED, STAGES)
    at = out + (whole * tl.program_id(1) + before) * width
    if TURNED:
        acc = acc.T
    written = live & (column + n < width)[None, :]
    tl.store(at + (m[:, None] * width + column + n[None, :]), acc.to(out.dtype.element_ty), written)


@triton.jit
def every_fourth(words, out, number, SIZE: tl.constexpr):
    """`out [4, number]`: the four numbers of 16 bits of each of `words [number]`, apart."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    word = tl.load(words + at, at < number, other=0)
    for place in tl.static_range(4):
        start = tl.full((), place, tl.int64) * number
        tl.store(out + start + at, (word >> (16 * place)).to(tl.int16), at < number)


@triton.jit
def sum_of_parts(parts, out, numbers, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """`parts [PARTS, numbers]` in float32, added one after the other."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros((SIZE,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + tl.full((), part, tl.int64) * numbers + at, at < numbers, other=0.0)
    tl.store(out + at, total.to(tl.bfloat16), at < numbers)


def _parts(tiles: int, steps: int, device: torch.device) -> int:
    """In how many parts a sum of `steps` is cut for `tiles` to fill the chip: each has four steps at least."""
    most = min(2 * multiprocessors(device) // tiles, steps // 4, 16)
    return 1 if most < 2 else 1 << (most.bit_length() - 1)


def _apart(rows: Tensor) -> Tensor:
    """Columns 4 i + p of contiguous rows `[N, K]` as part p -> `[4, N, K/4]`."""
    out = torch.empty((4, len(rows), rows.shape[1] // 4), dtype=rows.dtype, device=rows.device)
    words = rows.view(torch.int64)
    every_fourth[(triton.cdiv(words.numel(), 1024),)](words, out.view(torch.int16), words.numel(), SIZE=1024)
    return out


def product(
    rows: Tensor, codes: Tensor, scales: Tensor, order: Table | None, tile: Tiles, *, fp4: bool, fnuz: bool,
    hardware: bool, pairs: bool,
) -> Tensor:  # fmt: skip
    """Rows `[N, K]` times codes `[E, O, K]` (bytes; `[E, O, K/2]` of FP4) under their scales -> `[N, O]` bfloat16.

    `scales` are float32 or bytes of UE8M0. Without `order` all rows are of the one matrix that there is.
    """
    (count, depth), width = rows.shape, codes.shape[1]
    tile = {**tile, "BK": dividing(tile["BK"], depth)}
    steps = depth // tile["BK"]
    most = (triton.cdiv(count, tile["BM"]) if order is None else order.most) * triton.cdiv(width, tile["BN"])
    parts = _parts(most, steps, rows.device)
    out = torch.empty((count, width), dtype=torch.bfloat16, device=rows.device)
    summed = out
    if parts > 1:
        summed = torch.empty((parts, count, width), dtype=torch.float32, device=rows.device)
    if fp4:
        rows = _apart(rows)
        codes = codes.view(torch.int16)
    tiles, spans = (codes, codes) if order is None else order
    quantised_product[(most, parts)](
        rows, codes, scales, summed, tiles, spans, len(codes), count, width, codes.shape[2], scales.shape[-1],
        steps, triton.cdiv(steps, parts),
        FP4=fp4, UE8M0=scales.dtype is torch.uint8, FNUZ=fnuz, HARDWARE=hardware, BY_PAIRS=pairs, DENSE=order is None,
        **tile,
    )  # fmt: skip
    if parts > 1:
        sum_of_parts[(triton.cdiv(out.numel(), 1024),)](summed, out, out.numel(), PARTS=parts, SIZE=1024)
    return out
