"""Which tensors the Triton kernels quantise and read again; all others go through plain torch, with the same bits."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from undertow.quant.blocks import Block
from undertow.quant.dialect import native_dialect
from undertow.quant.formats import E2M1, E4M3_FNUZ, UE8M0, Format
from undertow.quant.scheme import Scheme


def refusal(device: torch.device, block: Block) -> str | None:
    """Why no kernel serves tensors on `device` in blocks of `block`; None if one does."""
    if device.type != "cuda":
        return f"kernels run on a GPU, the tensor is on {device.type}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    from undertow.ops.triton import block_scales

    return block_scales.refusal(block.rows, block.columns)


def architecture(device: torch.device) -> str:
    """`gfx942`, without feature flags, for an AMD GPU; `sm_90` for an NVIDIA GPU."""
    properties = torch.cuda.get_device_properties(device)
    return properties.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}"


@lru_cache(maxsize=64)
def converts(device: torch.device) -> bool:
    """Whether the chip has instructions to and from OCP's E4M3; elsewhere kernels convert by integers."""
    return device.type == "cuda" and native_dialect(architecture(device)) == "ocp"


def quantise(values: Tensor, scheme: Scheme, floor: float) -> tuple[Tensor, Tensor]:
    """Codes, uint8, and scales of `values` `[..., R, C]`; see `undertow.quant.quantise`."""
    from undertow.ops.triton.block_scales import quantise_blocks

    rows, columns = _sides(scheme.block)
    ue8m0 = scheme.scale == "ue8m0"
    codes, scales = quantise_blocks(
        values, rows, columns, fp4=scheme.format is E2M1, ue8m0=ue8m0, floor=floor,
        doubled=scheme.format is E4M3_FNUZ, hardware=converts(values.device),
    )  # fmt: skip
    return codes, scales.view(UE8M0.dtype) if ue8m0 else scales


def dequantise(codes: Tensor, scales: Tensor, format: Format, block: Block, dtype: torch.dtype) -> Tensor:
    """The numbers of codes, uint8, and scales under their label; see `Quantised.dequantise`."""
    from undertow.ops.triton.block_scales import dequantise_blocks

    plain = scales.view(torch.uint8) if scales.dtype is UE8M0.dtype else scales
    return dequantise_blocks(
        codes, plain, *_sides(block), dtype, fp4=format is E2M1, fnuz=format is E4M3_FNUZ,
        hardware=converts(codes.device),
    )  # fmt: skip


def _sides(block: Block) -> tuple[int, int]:
    rows, columns = block
    assert rows is not None and columns is not None  # refused before
    return rows, columns
