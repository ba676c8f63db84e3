"""MXFP4 of bfloat16 and back, two numbers of a row at a time: they share a word on one side and a byte on the other.

The definition is `undertow.quant`. Numbers in float32 or float16 go through `block_scales`.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from undertow.ops.triton.small_floats import ceiling_code, power_of_two

_ROWS, _GROUPS = 2, 32


@triton.jit
def _code(x, factor):
    """Codes (int32, with the sign in bit 3) of bfloat16 numbers held as float32; `factor` brings them to 12 at most,
    which is twice E2M1's largest.

    The code of twice a magnitude y, before it is rounded, is the least of y, y / 2 + 2 and y / 4 + 4: one line for each
    distance of neighbours. All three are exact for the 8 significant bits of bfloat16.
    """
    y = tl.abs(x) * factor
    line = tl.minimum(y, tl.minimum(y * 0.5 + 2.0, y * 0.25 + 4.0))
    # Above 2^23 the last bit is 1, so the sum is rounded to whole numbers, ties to even.
    whole = (line + 8388608.0).to(tl.int32, bitcast=True)
    return (whole & 7) | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _codes_by_pairs(word, factor):
    """Codes of the two bfloat16 numbers of each word, in its low byte, by instructions that take both at once.

    As `_code`, but in bfloat16: from 128 on its last bit is 1, so that each line is rounded to whole numbers, ties to
    even, by the one addition that makes it. `factor` is a bfloat16 power of two in both halves.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 y, a, b, c, slope, start;
        and.b32 y, $1, 0x7FFF7FFF;
        mul.rn.bf16x2 y, y, $2;
        mov.b32 slope, 0x3F803F80;  // 1
        mov.b32 start, 0x43004300;  // 128
        fma.rn.bf16x2 a, y, slope, start;
        mov.b32 slope, 0x3F003F00;  // 1 / 2
        mov.b32 start, 0x43024302;  // 128 + 2
        fma.rn.bf16x2 b, y, slope, start;
        mov.b32 slope, 0x3E803E80;  // 1 / 4
        mov.b32 start, 0x43044304;  // 128 + 4
        fma.rn.bf16x2 c, y, slope, start;
        min.bf16x2 a, a, b;
        min.bf16x2 a, a, c;
        and.b32 a, a, 0x00070007;
        shr.u32 b, a, 12;
        or.b32 a, a, b;
        shr.u32 b, $1, 12;
        shr.u32 c, $1, 24;
        and.b32 b, b, 0x08;
        and.b32 c, c, 0x80;
        or.b32 b, b, c;
        or.b32 $0, a, b;
        }""",
        "=r,r,r", [word, factor], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _write(
    words, codes, scales, rows, pairs, grid_columns, floor,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, BY_PAIRS: tl.constexpr,
):  # fmt: skip
    """`words` are two bfloat16 numbers each; a group is 16 of them."""
    first = (tl.program_id(0).to(tl.int64) * ROWS) * pairs + tl.program_id(1) * GROUPS * 16
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.program_id(1) * GROUPS * 16 + tl.arange(0, GROUPS * 16)
    inside = (row < rows)[:, None] & (pair < pairs)[None, :]
    place = tl.arange(0, ROWS)[:, None] * pairs + tl.arange(0, GROUPS * 16)[None, :]
    word = tl.reshape(tl.load(words + first + place, inside, other=0), (ROWS, GROUPS, 16))
    # The lower half of a word stays behind its upper number: it is cut off after the largest is found.
    low, high = (word << 16).to(tl.float32, bitcast=True), word.to(tl.float32, bitcast=True)
    most = tl.reduce(_larger(tl.abs(low), tl.abs(high)), 2, _larger)
    # Magnitudes compare as integers too, and NaN is then the largest.
    most = tl.maximum(most.to(tl.int32, bitcast=True) & 0x7FFF0000, floor)
    told = ceiling_code(most, 0x40C00000)
    # Twice the reciprocal: a scale of 2^-126 at least leaves room for that.
    if BY_PAIRS:
        factor = (255 - told) * 0x00800080
        both = _codes_by_pairs(word, tl.broadcast_to(factor[:, :, None], (ROWS, GROUPS, 16)))
    else:
        factor = power_of_two(tl.where(told == 255, 0, 255 - told))[:, :, None]
        high = (word & -65536).to(tl.float32, bitcast=True)
        both = _code(low, factor) | (_code(high, factor) << 4)
    # A group with a NaN or an infinity has codes of zero under a scale of NaN.
    both = tl.where((told < 255)[:, :, None], both, 0)
    tl.store(codes + first + place, tl.reshape(both.to(tl.uint8), (ROWS, GROUPS * 16)), inside)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    above = (tl.program_id(0).to(tl.int64) * ROWS) * grid_columns
    grid_place = tl.arange(0, ROWS)[:, None] * grid_columns + group[None, :]
    tl.store(scales + above + grid_place, told.to(tl.uint8), (row < rows)[:, None] & (group < grid_columns)[None, :])


@triton.jit
def _value(code, scale):
    """Bits of the bfloat16 numbers, in the upper half of int32, of codes below 16 times powers of two."""
    magnitude = code & 7
    # From 1 on, exponent and fraction lie where float32 has them; below there are 0 and 1/2.
    bits = tl.where(magnitude < 2, magnitude * 0x3F000000, (magnitude << 22) + 0x3F000000)
    value = (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True) * scale
    return value.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def _read(codes, scales, words, rows, pairs, grid_columns, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    first = (tl.program_id(0).to(tl.int64) * ROWS) * pairs + tl.program_id(1) * GROUPS * 16
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.program_id(1) * GROUPS * 16 + tl.arange(0, GROUPS * 16)
    inside = (row < rows)[:, None] & (pair < pairs)[None, :]
    place = tl.arange(0, ROWS)[:, None] * pairs + tl.arange(0, GROUPS * 16)[None, :]
    both = tl.reshape(tl.load(codes + first + place, inside, other=0).to(tl.int32), (ROWS, GROUPS, 16))
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    above = (tl.program_id(0).to(tl.int64) * ROWS) * grid_columns
    grid_place = tl.arange(0, ROWS)[:, None] * grid_columns + group[None, :]
    told = tl.load(scales + above + grid_place, (row < rows)[:, None] & (group < grid_columns)[None, :], other=0)
    scale = power_of_two(told.to(tl.int32))[:, :, None]
    word = (_value(both & 15, scale) & 0xFFFF) | (_value(both >> 4, scale) << 16)
    tl.store(words + first + place, tl.reshape(word, (ROWS, GROUPS * 16)), inside)


def write_mxfp4(values: Tensor, floor: float = 0.0) -> tuple[Tensor, Tensor]:
    """Codes uint8 `[..., R, C/2]` and UE8M0 scales uint8 `[..., R, ⌈C/32⌉]` of bfloat16 `[..., R, C]`, C even."""
    values = values.contiguous()
    *lead, wide = values.shape
    codes = values.new_empty((*lead, wide // 2), dtype=torch.uint8)
    scales = values.new_empty((*lead, -(-wide // 32)), dtype=torch.uint8)
    if values.numel():
        least = torch.tensor(floor, dtype=torch.float32).view(torch.int32).item()
        rows, across = values.numel() // wide, scales.shape[-1]
        _write[_grid(rows, across)](
            values.view(torch.int32), codes, scales, rows, wide // 2, across, least,
            ROWS=_ROWS, GROUPS=_GROUPS, BY_PAIRS=_takes_pairs(values.device), num_warps=1,
        )  # fmt: skip
    return codes, scales


def _takes_pairs(device: torch.device) -> bool:
    """Whether the chip has the instructions of `_codes_by_pairs`: an NVIDIA GPU from Hopper on."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


def read_mxfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers in bfloat16 `[..., R, C]`, rounded where a scale leads below its normal numbers."""
    codes, scales = codes.contiguous(), scales.contiguous()
    *lead, half = codes.shape
    values = codes.new_empty((*lead, 2 * half), dtype=torch.bfloat16)
    if values.numel():
        rows, across = codes.numel() // half, scales.shape[-1]
        _read[_grid(rows, across)](
            codes, scales, values.view(torch.int32), rows, half, across,
            ROWS=_ROWS, GROUPS=_GROUPS, num_warps=2,
        )  # fmt: skip
    return values


def _grid(rows: int, across: int) -> tuple[int, int]:
    return triton.cdiv(rows, _ROWS), triton.cdiv(across, _GROUPS)
