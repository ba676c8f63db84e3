"""MXFP4 as FP8: the same numbers for machines without FP4 units, where FP8 can hold them."""

from __future__ import annotations

import torch
from torch import Tensor

from undertow.config.errors import InputError
from undertow.quant.blocks import Block, grid_shape, join, matrices, split, tiles
from undertow.quant.codec import decode, encode
from undertow.quant.formats import E2M1, E4M3, UE8M0
from undertow.quant.packing import unpack
from undertow.quant.quantised import Quantised
from undertow.quant.scales import scale_values
from undertow.quant.scheme import MXFP4, WEIGHTS

_GROUP = Block(1, 32)
_HEADROOM = 6  # 6 * 2^6 = 384 is the largest product of an FP4 number and a power of two within 448


def fp8_from_fp4(tensor: Quantised, block: Block = WEIGHTS.block) -> Quantised:
    """The numbers of an MXFP4 tensor as OCP FP8 with UE8M0 scales, exactly; -0 becomes 0.

    A block's scale is its largest FP4 scale by 2^6, where groups of zeros do not count. All numbers fit if the scales
    of a block span at most 2^14. Raises `InputError` if one does not, so that nothing is rounded.
    """
    if tensor.scheme != MXFP4:
        raise InputError(f"{tensor.scheme}: MXFP4 is expected")
    if block.rows is None or block.columns is None or block.columns % 32:
        raise InputError(f"FP8 blocks of {block} from MXFP4: rows and columns are expected, columns a multiple of 32")
    codes = torch.empty(tensor.shape, dtype=torch.uint8, device=tensor.payload.device)
    scales = torch.empty(grid_shape(tensor.shape, block), dtype=torch.uint8, device=codes.device)
    parts = (codes, scales, tensor.payload.view(torch.uint8), tensor.scales.view(torch.uint8))
    lost = 0
    for target, grid, packed, groups in zip(*(matrices(part, block) for part in parts), strict=True):
        for tile in tiles(target.shape, block):
            rows, columns = tile.part
            numbers = decode(unpack(packed[rows, columns.start // 2 : columns.stop // 2]), E2M1)
            exponents = groups[rows, columns.start // 32 : -(-columns.stop // 32)]
            target[tile.part], grid[tile.grid], wrong = _widen(numbers, exponents, block)
            lost += wrong
    if lost:
        raise InputError(
            f"{lost} of {codes.numel()} FP4 numbers are no FP8 numbers in blocks of {block}, where scales span more "
            "than 2^14; keep the tensor in FP4 or dequantise it"
        )
    return Quantised(codes.view(E4M3.dtype), scales.view(UE8M0.dtype), block)


def _widen(numbers: Tensor, exponents: Tensor, block: Block) -> tuple[Tensor, Tensor, int]:
    """Codes and scale codes of a tile, and how many numbers they do not hold exactly."""
    shape = (numbers.shape[0], numbers.shape[1])
    grouped = split(numbers, _GROUP)
    used = grouped.ne(0).any(3).squeeze(1)
    over = Block(block.rows, (block.columns or 32) // 32)
    largest = split(torch.where(used, exponents, 0), over).amax(3).amax(1)
    empty = ~split(used, over).any(3).any(1)
    chosen = torch.where(empty, UE8M0.bias, (largest.int() - _HEADROOM).clamp(min=0)).to(torch.uint8)
    spread = chosen[:, None, :, None].expand(-1, over.rows or 1, -1, over.columns or 1)
    per_group = join(spread, (exponents.shape[0], exponents.shape[1]))
    ratio = decode(exponents, UE8M0) / scale_values(per_group.view(UE8M0.dtype))
    # Groups of zeros may have any scale, NaN among them.
    wanted = join(grouped * torch.where(used, ratio, 0)[:, None, :, None], shape)
    wrong = wanted.isnan()
    codes = encode(wanted.masked_fill(wrong, 0), E4M3)
    codes = codes.masked_fill(codes == 0x80, 0)
    wrong |= decode(codes, E4M3) != wanted
    return codes, chosen, int(wrong.sum())
