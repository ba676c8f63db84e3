"""A ragged batch: which rows are whose, and descriptors that end where an expert's rows do.

Counts stay on the device. A grid is made for the most tiles that they can give, and programs read from a table which
tile is theirs and how many there are.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

WIDTH = tl.constexpr(5)
"""Numbers of a row of the table, see `Table`."""


class Table(NamedTuple):
    """`tiles [most, WIDTH]` int32, a row tile each: its expert, that one's first tile, its tiles, its first row, its
    rows; `spans [2 E + 1]` int32: first row and rows of each expert, then how many tiles there are."""

    tiles: Tensor
    spans: Tensor

    @property
    def most(self) -> int:
        """Row tiles that any counts of the same sum can give."""
        return len(self.tiles)


@triton.jit
def grouped_table(
    counts, tiles, spans, experts, rows, EXPERTS: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Program e: the span and the tiles of expert e."""
    e = tl.program_id(0)
    all_of = tl.arange(0, EXPERTS)
    count = tl.load(counts + all_of, all_of < experts, other=0).to(tl.int32)
    # Counts of a larger sum than there are rows must not reach beyond them.
    end = tl.cumsum(count, 0)
    count = tl.minimum(end, rows) - tl.minimum(end - count, rows)
    height = (count + BM - 1) // BM
    start = tl.sum(tl.where(all_of < e, count, 0), 0)
    first = tl.sum(tl.where(all_of < e, height, 0), 0)
    own = tl.sum(tl.where(all_of == e, count, 0), 0)
    own_height = tl.sum(tl.where(all_of == e, height, 0), 0)
    tl.store(spans + 2 * e, start)
    tl.store(spans + 2 * e + 1, own)
    if e == experts - 1:
        tl.store(spans + 2 * experts, first + own_height)
    for r in range(0, own_height, ROWS):
        row = first + r + tl.arange(0, ROWS)
        inside = row < first + own_height
        place = tiles + row * WIDTH
        tl.store(place, tl.full((ROWS,), 0, tl.int32) + e, inside)
        tl.store(place + 1, tl.full((ROWS,), 0, tl.int32) + first, inside)
        tl.store(place + 2, tl.full((ROWS,), 0, tl.int32) + own_height, inside)
        tl.store(place + 3, tl.full((ROWS,), 0, tl.int32) + start, inside)
        tl.store(place + 4, tl.full((ROWS,), 0, tl.int32) + own, inside)


def table(counts: Tensor, rows: int, height: int) -> Table:
    """The table of `rows` rows, `counts [E]` for each expert, in tiles of `height`."""
    experts = len(counts)
    most = min(rows // height + experts, rows)
    tiles = torch.empty((most, WIDTH.value), dtype=torch.int32, device=counts.device)
    spans = torch.empty(2 * experts + 1, dtype=torch.int32, device=counts.device)
    grouped_table[(experts,)](
        counts, tiles, spans, experts, rows, EXPERTS=triton.next_power_of_2(experts), BM=height, ROWS=32, num_warps=1
    )
    return Table(tiles, spans)


_TURN = tl.constexpr(1 << 30)


def ragged(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A contiguous matrix in tiles of `rows` x `columns` that end with an expert's rows: what lies behind them is read
    as zero and not written.

    A descriptor's bounds are the same for all experts, so rows are counted from the end of an expert's span, which
    is put on the bound. Two further coordinates take the address back: it is a sum modulo 2^64.
    """
    width = matrix.shape[1]
    far = (1 << 31) - (1 << 16)
    return TensorDescriptor(
        matrix, [far, far, _TURN.value, width], [(1 << 34) - width, width, width, 1], [1, 1, rows, columns]
    )


@triton.jit
def place(start, size, row):
    """The first three coordinates of the tile from `row` of a span on."""
    turn = tl.full((), _TURN, tl.int32)
    return turn, start + size, turn - size + row


@triton.jit
def in_turn(local, down, across, GROUP: tl.constexpr):
    """Row and column of the `local`-th tile of `down` x `across`: GROUP below each other, then the next column."""
    band = local // (GROUP * across)
    high = tl.minimum(down - band * GROUP, GROUP)
    inside = local % (GROUP * across)
    return band * GROUP + inside % high, inside // high
