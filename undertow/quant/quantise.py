"""Numbers to a quantised tensor, tile by tile."""

from __future__ import annotations

import torch
from torch import Tensor

from undertow.config.errors import InputError
from undertow.quant import kernels
from undertow.quant.blocks import Block, grid_shape, join, matrices, split, tiles
from undertow.quant.codec import FLOATS, encode
from undertow.quant.formats import E2M1, E4M3, Format
from undertow.quant.packing import pack
from undertow.quant.quantised import Quantised
from undertow.quant.scales import doubled, scale_values, scales_for
from undertow.quant.scheme import SCALE_TYPES, Scheme


def quantise(values: Tensor, scheme: Scheme, floor: float = 0.0, generator: torch.Generator | None = None) -> Quantised:
    """`values` `[..., R, C]` (float32, bfloat16 or float16) in `scheme`.

    A block's scale is made from its largest magnitude, taken to be at least `floor`; each value by its scale is rounded
    to the nearest number, ties to even, or at random without bias if there is a `generator`. A block with a NaN or an
    infinity gets the scale NaN. Magnitudes near the largest float32 may be rounded up to a product that reads as
    infinite. FP8 codes are canonical: FNUZ has the bytes of OCP under scales of twice the size.
    Beside the result and the scales in float32 it needs a few megabytes. On a GPU one kernel does it
    where `kernels.refusal` has no objection. Raises `InputError` for values and schemes that do not fit.
    """
    _check(values, scheme, floor)
    values, block = values.detach(), scheme.block
    if generator is None and kernels.refusal(values.device, block) is None:
        codes, scales = kernels.quantise(values, scheme, floor)
        return Quantised(codes.view(scheme.format.dtype), scales, block)
    # Magnitudes are scaled to 448 in OCP and so to 224 in FNUZ: above it FNUZ has one number, and that is OCP's NaN.
    format = E2M1 if scheme.format is E2M1 else E4M3
    scales = scales_for(block_maxima(values, block).clamp(min=floor), format, SCALE_TYPES[scheme.scale])
    width = values.shape[-1] // (2 if format is E2M1 else 1)
    codes = torch.empty((*values.shape[:-1], width), dtype=torch.uint8, device=values.device)
    grouped = zip(matrices(values, block), matrices(codes, block), matrices(scales, block), strict=True)
    for matrix, target, grid in grouped:
        for tile in tiles(matrix.shape, block):
            found = _encode(matrix[tile.part], scale_values(grid[tile.grid]), block, format, generator)
            rows, columns = tile.part
            if format is E2M1:
                target[rows, columns.start // 2 : columns.stop // 2] = pack(found)
            else:
                target[tile.part] = found.masked_fill_(found == 0x80, 0)
    if scheme.dialect == "fnuz":
        scales = doubled(scales)
    return Quantised(codes.view(scheme.format.dtype), scales, block)


def block_maxima(values: Tensor, block: Block) -> Tensor:
    """The largest magnitude of each block, float32, in the shape of the scales; NaN where a block holds one."""
    maxima = torch.zeros(grid_shape(tuple(values.shape), block), device=values.device)
    for matrix, grid in zip(matrices(values, block), matrices(maxima, block), strict=True):
        for tile in tiles(matrix.shape, block):
            found = split(matrix[tile.part].float().abs(), block).amax(1).amax(2)
            grid[tile.grid] = torch.maximum(grid[tile.grid], found)
    return maxima


def _encode(part: Tensor, scales: Tensor, block: Block, format: Format, generator: torch.Generator | None) -> Tensor:
    scaled = split(part.float(), block) / scales[:, None, :, None]
    if bool(scales.isnan().any()):
        scaled.masked_fill_(scales.isnan()[:, None, :, None], 0)
    return encode(join(scaled, (part.shape[0], part.shape[1])), format, generator)


def _check(values: Tensor, scheme: Scheme, floor: float) -> None:
    if not isinstance(values, Tensor):
        raise InputError(f"values of type {type(values).__name__}: a torch.Tensor is expected; use torch.from_numpy")
    if not isinstance(scheme, Scheme):
        raise InputError(f"scheme {scheme!r}: a Scheme is expected, such as WEIGHTS or MXFP4 of undertow.quant.scheme")
    if values.dtype not in FLOATS:
        raise InputError(f"values of type {values.dtype}: float32, bfloat16 or float16 is expected; convert them first")
    if values.dim() < 2:
        raise InputError(f"shape {list(values.shape)}: a tensor with rows and columns is expected; add a dimension")
    if scheme.format is E2M1 and values.shape[-1] % 2:
        raise InputError(f"{values.shape[-1]} columns of FP4: an even number is expected, since two share a byte")
    if values.layout is not torch.strided or values.is_meta:
        kind = "on the meta device" if values.is_meta else f"of the layout {values.layout}"
        raise InputError(f"values {kind}: numbers that lie in memory are expected; make them so first")
    if not 0 <= floor <= torch.finfo(torch.float32).max:
        raise InputError(f"floor {floor}: a finite magnitude that float32 holds, zero or more, is expected")
