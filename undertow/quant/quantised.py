"""A quantised tensor, which carries what is needed to read it."""

from __future__ import annotations

import torch
from torch import Tensor

from undertow.config.errors import InputError
from undertow.quant import kernels
from undertow.quant.blocks import Block, check_block, grid_shape, join, matrices, split, tiles
from undertow.quant.canonical import canonical
from undertow.quant.codec import FLOATS, decode
from undertow.quant.dialect import Dialect
from undertow.quant.formats import E2M1, Format, format_of
from undertow.quant.packing import unpack
from undertow.quant.scales import SCALE_DTYPES, doubled, halved, scale_values
from undertow.quant.scheme import Scheme


class Quantised:
    """Codes, their scales, and the scheme that gives both a meaning.

    No method changes it. It shares memory with the tensors it was made of: whoever writes into these changes what it
    reads as.

    `payload` is a tensor of `float8_e4m3fn` or `float8_e4m3fnuz` `[..., R, C]`, or of `float4_e2m1fn_x2`
    `[..., R, C/2]`; `scales` has one `float8_e8m0fnu` or float32 for each `block`. Dialect and scale type are those of
    the dtypes, so there is no second place that could say otherwise. Raises `InputError` for bytes without such a
    label, and for scales whose shape is not the grid of the blocks.
    """

    __slots__ = ("_payload", "_scales", "_scheme")

    def __init__(self, payload: Tensor, scales: Tensor, block: Block):
        for what, given in (("codes", payload), ("scales", scales)):
            if not isinstance(given, Tensor):
                raise InputError(f"{what} of type {type(given).__name__}: a torch.Tensor is expected")
        check_block(block)
        format = format_of(payload.dtype)
        if format is None or not format.signed:
            raise InputError(
                f"codes of type {payload.dtype} say no format and no dialect; float8_e4m3fn, float8_e4m3fnuz or "
                "float4_e2m1fn_x2 is expected, viewed as what their writer meant"
            )
        if scales.dtype not in SCALE_DTYPES:
            raise InputError(f"scales of type {scales.dtype}: float8_e8m0fnu or float32 is expected")
        if payload.device != scales.device:
            raise InputError(f"codes on {payload.device} and scales on {scales.device}: one device is expected")
        self._scheme = Scheme(format, block, "float32" if scales.dtype is torch.float32 else "ue8m0")
        self._payload, self._scales = payload.detach(), scales.detach()
        expected = grid_shape(self.shape, block)
        if tuple(scales.shape) != expected:
            raise InputError(
                f"scales of shape {list(scales.shape)}: {list(expected)} is expected for {list(self.shape)} in blocks "
                f"of {block}"
            )

    @property
    def scheme(self) -> Scheme:
        """Format with its dialect, block, and type of the scales."""
        return self._scheme

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers; two of FP4 share a byte of the payload."""
        *lead, columns = self._payload.shape
        return (*lead, columns * 2 if self._scheme.format is E2M1 else columns)

    @property
    def payload(self) -> Tensor:
        """The codes under their label."""
        return self._payload

    @property
    def scales(self) -> Tensor:
        """The scales under their label."""
        return self._scales

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self._payload.nbytes + self._scales.nbytes

    def __repr__(self) -> str:
        return f"Quantised({list(self.shape)}, {self._scheme}, {self._payload.device})"

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers, code times scale in float32 rounded to `dtype` (float32, bfloat16 or float16).

        Exact for UE8M0 scales in float32 and bfloat16 within their ranges; a product beyond them is infinite. Beside
        the result it needs a few megabytes.
        """
        if dtype not in FLOATS:
            raise InputError(f"dequantising to {dtype}: float32, bfloat16 or float16 is expected")
        if kernels.refusal(self._payload.device, self._scheme.block) is None:
            codes = self._payload.view(torch.uint8)
            return kernels.dequantise(codes, self._scales, self._scheme.format, self._scheme.block, dtype)
        numbers = torch.empty(self.shape, dtype=dtype, device=self._payload.device)
        block, format = self._scheme.block, self._scheme.format
        grouped = zip(
            matrices(numbers, block),
            matrices(self._payload.view(torch.uint8), block),
            matrices(self._scales, block),
            strict=True,
        )
        for result, codes, scales in grouped:
            for tile in tiles(result.shape, block):
                found = split(decode(_read(codes, tile.part, format), format), block)
                found *= scale_values(scales[tile.grid])[:, None, :, None]
                target = result[tile.part]
                target.copy_(join(found, (target.shape[0], target.shape[1])))
        return numbers

    def to(self, device: torch.device | str) -> Quantised:
        """The same codes and scales on `device`."""
        codes = self._payload.view(torch.uint8).to(device).view(self._payload.dtype)
        return Quantised(codes, self._scales.to(device), self._scheme.block)

    def in_dialect(self, dialect: Dialect) -> Quantised:
        """The same numbers in the FP8 of `dialect`: same bytes, scales doubled (to fnuz) or halved (to ocp).

        Exact, except that -0 becomes 0. MXFP4, and a tensor that is in `dialect` already, is returned as it is. Raises
        `InputError` for codes that one of the dialects reads as NaN, and for scales at the end of their range.
        """
        wanted = self._scheme.in_dialect(dialect)
        if wanted == self._scheme:
            return self
        scales = doubled(self._scales) if dialect == "fnuz" else halved(self._scales)
        return Quantised(canonical(self._payload).view(wanted.format.dtype), scales, wanted.block)


def _read(codes: Tensor, part: tuple[slice, slice], format: Format) -> Tensor:
    rows, columns = part
    if format is not E2M1:
        return codes[part]
    return unpack(codes[rows, columns.start // 2 : columns.stop // 2])
