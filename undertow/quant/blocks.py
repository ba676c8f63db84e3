"""Blocks of a matrix that share a scale, and the tiles by which large tensors are worked through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from undertow.config.errors import InputError

TILE = 1 << 17
"""Elements worked on at a time: their float32 intermediates fit a core's cache, and bound the memory needed."""


class Block(NamedTuple):
    """`rows` x `columns` elements of the last two dimensions under one scale; blocks at the end may be cut short.

    `WHOLE`, which has neither, is one scale for a tensor.
    """

    rows: int | None
    columns: int | None

    def __str__(self) -> str:
        return "whole tensor" if self == WHOLE else f"{self.rows}x{self.columns}"


WHOLE = Block(None, None)


class Tile(NamedTuple):
    """A part of a matrix, in elements, and the part of its scale grid that belongs to it."""

    part: tuple[slice, slice]
    grid: tuple[slice, slice]


def check_block(block: Block) -> None:
    """Raise `InputError` for a block without a size."""
    if not isinstance(block, Block):
        raise InputError(f"blocks of {block!r}: a Block is expected, such as Block(128, 128) of undertow.quant.blocks")
    if block != WHOLE and not all(type(side) is int and side > 0 for side in block):
        raise InputError(f"block {tuple(block)}: two positive numbers of elements, or WHOLE, are expected")


def grid_shape(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """Shape of the scales of a tensor `[..., R, C]`: `[..., ⌈R/rows⌉, ⌈C/columns⌉]`, or `[]` for `WHOLE`."""
    if len(shape) < 2:
        raise InputError(f"shape {list(shape)}: a tensor with rows and columns is expected; add a dimension")
    if block.rows is None or block.columns is None:
        return ()
    return (*shape[:-2], -(-shape[-2] // block.rows), -(-shape[-1] // block.columns))


def matrices(tensor: Tensor, block: Block) -> list[Tensor]:
    """`tensor` as matrices with a grid of scales each: few of them where rows have scales of their own.

    Views, except of a tensor of three dimensions or more that does not lie in memory row after row.
    """
    if tensor.dim() < 2:
        return [tensor.reshape(1, 1)]
    if block.rows in (None, 1):
        return [tensor.flatten(0, -2)]
    return [tensor] if tensor.dim() == 2 else list(tensor.flatten(0, -3))


def tiles(shape: Sequence[int], block: Block, size: int = TILE) -> Iterator[Tile]:
    """Tiles of at most `size` elements, or one block, that cover a matrix; only blocks at its ends are cut."""
    rows, columns = shape
    high, wide = block.rows or 1, block.columns or 1
    across = max(size // high // wide, 1) * wide
    down = max(size // (high * min(across, -(-columns // wide) * wide or 1)), 1) * high
    for row in range(0, rows, down):
        for column in range(0, columns, across):
            part = slice(row, min(row + down, rows)), slice(column, min(column + across, columns))
            yield Tile(part, _grid(part, block))


def _grid(part: tuple[slice, slice], block: Block) -> tuple[slice, slice]:
    if block.rows is None or block.columns is None:
        return slice(0, 1), slice(0, 1)
    row, column = part
    return (
        slice(row.start // block.rows, -(-row.stop // block.rows)),
        slice(column.start // block.columns, -(-column.stop // block.columns)),
    )


def split(tile: Tensor, block: Block) -> Tensor:
    """`[R, C]` to `[⌈R/rows⌉, rows, ⌈C/columns⌉, columns]`, filled up with zeros; `WHOLE` gives `[1, R, 1, C]`."""
    rows, columns = tile.shape
    high, wide = block.rows or rows, block.columns or columns
    if rows % high or columns % wide:
        tile = torch.nn.functional.pad(tile, (0, -columns % wide, 0, -rows % high))
    return tile.reshape(-(-rows // high), high, -(-columns // wide), wide)


def join(blocks: Tensor, shape: tuple[int, int]) -> Tensor:
    """The inverse of `split`: `[R, C]` = `shape` of it, without what was filled up."""
    down, high, across, wide = blocks.shape
    return blocks.reshape(down * high, across * wide)[: shape[0], : shape[1]]
