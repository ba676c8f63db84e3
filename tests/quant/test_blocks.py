"""Blocks, their grids, and tiles that hold whole blocks."""

from __future__ import annotations

import pytest
import torch

from undertow.config.errors import InputError
from undertow.quant.blocks import WHOLE, Block, check_block, grid_shape, join, matrices, split, tiles

BLOCKS = (Block(128, 128), Block(32, 32), Block(1, 128), Block(1, 64), Block(3, 5), WHOLE)
named = pytest.mark.parametrize("block", BLOCKS, ids=str)


def test_grid_of_ragged_shapes():
    assert grid_shape((256, 512), Block(128, 128)) == (2, 4)
    assert grid_shape((129, 1), Block(128, 128)) == (2, 1)
    assert grid_shape((7, 5, 130), Block(1, 64)) == (7, 5, 3)
    assert grid_shape((3, 40, 33), Block(32, 32)) == (3, 2, 2)
    assert grid_shape((0, 64), Block(1, 64)) == (0, 1)
    assert grid_shape((7, 5, 130), WHOLE) == ()
    with pytest.raises(InputError, match=r"shape \[5\]: a tensor with rows and columns"):
        grid_shape((5,), Block(1, 64))


@named
@pytest.mark.parametrize("shape", [(300, 257), (1, 1), (128, 128), (5, 1000), (0, 64), (64, 0)])
@pytest.mark.parametrize("size", [150, 1000, 1 << 17])
def test_tiles_cover_each_element_and_each_scale_of_a_block_once(block, shape, size):
    seen = torch.zeros(shape, dtype=torch.int32)
    owner = torch.full(shape, -1)
    grid = torch.arange(max(len(torch.empty(grid_shape(shape, block)).flatten()), 1))
    numbers = grid.view(1, 1) if block == WHOLE else grid[: grid_shape(shape, block)[0] * grid_shape(shape, block)[1]]
    numbers = numbers.view(1, 1) if block == WHOLE else numbers.view(grid_shape(shape, block))
    for tile in tiles(shape, block, size):
        seen[tile.part] += 1
        spread = split(torch.zeros_like(owner[tile.part]), block) + numbers[tile.grid][:, None, :, None]
        owner[tile.part] = join(spread, tuple(owner[tile.part].shape))
        assert owner[tile.part].numel() <= max(size, (block.rows or 1) * (block.columns or 1))
    assert bool((seen == 1).all())
    rows, columns = torch.meshgrid(torch.arange(shape[0]), torch.arange(shape[1]), indexing="ij")
    across = -(-shape[1] // (block.columns or max(shape[1], 1)))
    expected = rows // (block.rows or max(shape[0], 1)) * across + columns // (block.columns or max(shape[1], 1))
    assert torch.equal(owner, expected)


@named
def test_splitting_is_undone_and_fills_with_zeros(block):
    values = torch.randn(70, 150, generator=torch.Generator().manual_seed(0))
    parts = split(values, block)
    assert torch.equal(join(parts, (70, 150)), values)
    assert parts.double().sum() == pytest.approx(values.double().sum())


def test_matrices_are_views_that_share_a_grid():
    stack = torch.randn(3, 40, 33)
    assert [tuple(each.shape) for each in matrices(stack, Block(32, 32))] == [(40, 33)] * 3
    assert [tuple(each.shape) for each in matrices(stack, Block(1, 64))] == [(120, 33)]
    assert [tuple(each.shape) for each in matrices(stack, WHOLE)] == [(120, 33)]
    assert all(each.data_ptr() >= stack.data_ptr() for each in matrices(stack, Block(32, 32)))
    matrices(stack, Block(32, 32))[2].zero_()
    assert not bool(stack[2].any())


@pytest.mark.parametrize("block", [Block(0, 128), Block(-1, 1), Block(None, 128), Block(1.5, 2)])
def test_a_block_without_a_size_is_refused(block):
    with pytest.raises(InputError, match="two positive numbers of elements, or WHOLE"):
        check_block(block)
