"""Products with quantised weights in Triton, of routed experts on a ragged batch and of one matrix. Forward alone.

The definition is `undertow.ops.reference.quantised`: the product with what `Quantised.dequantise` gives, summed in
float32. Rows stay in bfloat16: nothing of them is rounded. No number of rows of an expert is read on the host.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from undertow.ops.triton.attention.descriptors import aligned
from undertow.ops.triton.attention.tiles import architecture
from undertow.ops.triton.grouped import linear as plain
from undertow.ops.triton.grouped.quantised_product import product
from undertow.ops.triton.grouped.quantised_tiles import kind, tiles
from undertow.ops.triton.grouped.ragged import Table, table
from undertow.quant.dialect import native_dialect
from undertow.quant.formats import E2M1, E4M3_FNUZ, UE8M0
from undertow.quant.quantised import Quantised
from undertow.quant.scheme import MXFP4, WEIGHTS

# From so many rows an expert on average, decoding once and the plain product are faster than widening in every tile.
MANY_ROWS = 512
# What the decoded weights of one call may take, for its time.
MOST_DECODED = 2 << 30


def refusal(x: Tensor, weight: Quantised, *, invariant: bool = False) -> str | None:
    """Why the kernels cannot serve a call with these operands, or None if they can."""
    scheme = weight.scheme
    if invariant:
        return "tiles and parts of a sum depend on how many rows share the call, and batch_invariant is on"
    if x.requires_grad and torch.is_grad_enabled():
        return "gradients of the rows are wanted, and there is no kernel for them"
    if x.dtype != torch.bfloat16:
        return f"rows are {str(x.dtype).removeprefix('torch.')}; they must be bfloat16"
    if scheme.block != (MXFP4 if scheme.format is E2M1 else WEIGHTS).block:
        return f"weights are {scheme}; blocks of FP8 must be 128x128"
    if weight.shape[-1] % 128:
        return f"matrices have {weight.shape[-1]} columns, which is not a multiple of 128"
    if not weight.payload.is_contiguous() or not weight.scales.is_contiguous() or weight.payload.data_ptr() % 16:
        return "the codes or scales are not contiguous, or the codes' address is not a multiple of 16"
    return None


def grouped_linear_quantised(x: Tensor, weight: Quantised, counts: Tensor, *, invariant: bool = False) -> Tensor:
    """Per-expert product: rows of `x [N, K]`, `counts[e]` of them for expert `e`, times `weight [E, O, K]` -> `[N, O]`,
    bfloat16, summed in float32.

    `weight` is FP8 in blocks of 128x128, in either dialect and with either type of scale, or MXFP4. `counts [E]`, of
    integers on the device of `x`, have the sum N, which is not checked: that would wait for the GPU. Only matrices of
    experts with rows are read. On an NVIDIA GPU weights under MXFP4 scales above 2^33 are infinite or NaN, and those
    below 2^-94 lose bits.

    From `MANY_ROWS` rows an expert on average, weights that bfloat16 holds exactly are decoded, if that takes no more
    than `MOST_DECODED` bytes, and the result has the bits of `grouped_linear` with them: the factors are the same
    numbers, the sums are in its order. So a row's last bits depend on how many rows there are; `invariant` must be off.
    """
    if len(x) == 0:
        return x.new_empty(0, weight.shape[1])
    if _decodes(weight, len(x), len(counts)):
        return plain.grouped_linear(x, weight.dequantise(torch.bfloat16), counts)
    name = _name(weight, len(x), len(counts))
    return _product(x, weight, name, table(counts, len(x), tiles(x.device, name)["BM"]))


def linear_quantised(x: Tensor, weight: Quantised, *, invariant: bool = False) -> Tensor:
    """`x [..., K]` times `weight [O, K]` transposed -> `[..., O]`; see `grouped_linear_quantised`."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) == 0:
        return x.new_empty(*x.shape[:-1], weight.shape[0])
    return _product(rows, weight, _name(weight, len(rows), 1), None).view(*x.shape[:-1], -1)


def _decodes(weight: Quantised, rows: int, experts: int) -> bool:
    """Whether the plain product takes the weights decoded: codes have at most four significant bits, so that
    under scales that are powers of two nothing is rounded."""
    exact = weight.scheme.scale == "ue8m0" and weight.shape[1] % 16 == 0
    return exact and rows >= MANY_ROWS * experts and 2 * prod(weight.shape) <= MOST_DECODED


def _name(weight: Quantised, rows: int, experts: int) -> str:
    return f"{'mxfp4' if weight.scheme.format is E2M1 else 'fp8'}, {kind(rows, experts)}"


def _product(x: Tensor, weight: Quantised, name: str, order: Table | None) -> Tensor:
    codes, scales, chip = weight.payload.view(torch.uint8), weight.scales, architecture(x.device)
    return product(
        aligned(x), codes if order is not None else codes[None],
        scales.view(torch.uint8) if scales.dtype is UE8M0.dtype else scales, order, tiles(x.device, name),
        fp4=weight.scheme.format is E2M1, fnuz=weight.scheme.format is E4M3_FNUZ,
        hardware=bool(chip) and native_dialect(chip) == "ocp", pairs=chip.startswith("sm_") and int(chip[3:]) >= 90,
    )  # fmt: skip
