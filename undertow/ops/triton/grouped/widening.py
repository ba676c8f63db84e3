"""Codes of quantised weights to bfloat16 in registers, for the products that read them.

E4M3 codes become the numbers that they are, since their blocks' scales come after the product; E2M1 codes, four to a
word of 16 bits, take theirs here.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import triton
import triton.language as tl

from undertow.ops.triton.small_floats import decode_e2m1, decode_e4m3, power_of_two


@triton.jit
def _pairs(words, factor):
    """The four numbers of each word of E2M1 codes times `factor`, bfloat16, two words at a time.

    Sign, exponent and fraction of a code go where bfloat16 has them, which gives 2^-126 times the number, those below
    1 too: a code times 2^12 + 2^6, without the bits between.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        and.b32 a, $4, 0x000F000F;
        mul.lo.u32 a, a, 0x1040;
        and.b32 a, a, 0x81C081C0;
        mul.rn.bf16x2 $0, a, $5;
        and.b32 a, $4, 0x00F000F0;
        mul.lo.u32 a, a, 0x104;
        and.b32 a, a, 0x81C081C0;
        mul.rn.bf16x2 $1, a, $5;
        shr.u32 b, $4, 8;
        and.b32 a, b, 0x000F000F;
        mul.lo.u32 a, a, 0x1040;
        and.b32 a, a, 0x81C081C0;
        mul.rn.bf16x2 $2, a, $5;
        and.b32 a, b, 0x00F000F0;
        mul.lo.u32 a, a, 0x104;
        and.b32 a, a, 0x81C081C0;
        mul.rn.bf16x2 $3, a, $5;
        }""",
        "=&r,=&r,=&r,=&r,r,r", [words, factor], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _number(words, factor, PLACE: tl.constexpr):
    """The number at a place of each word, from its lowest bits on."""
    return (decode_e2m1((words.to(tl.int32) >> (4 * PLACE)) & 15) * factor).to(tl.bfloat16)


@triton.jit
def widened_e2m1(words, told, BY_PAIRS: tl.constexpr):
    """The four numbers of each of `words [BN, C]` in bfloat16 under UE8M0 scales `told [BN, C // 8]`; by pairs they are
    2^-32 times as much."""
    high: tl.constexpr = words.shape[0]
    groups: tl.constexpr = told.shape[1]
    code = told.to(tl.int32)
    if BY_PAIRS:
        # 2^(126 - 32) of it are for the codes. What is above the range of bfloat16, and NaN, becomes infinite.
        factor = (code << 7).to(tl.int16).to(tl.bfloat16, bitcast=True) * tl.full((), 2.0**94, tl.bfloat16)
    else:
        factor = power_of_two(code)
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], (high, groups, 8)), (high, groups * 8))
    if BY_PAIRS:
        a, b, c, d = _pairs(words, factor)
    else:
        a, b = _number(words, factor, 0), _number(words, factor, 1)
        c, d = _number(words, factor, 2), _number(words, factor, 3)
    return a, b, c, d


@triton.jit
def widened_e4m3(bytes, FNUZ: tl.constexpr, HARDWARE: tl.constexpr):
    """E4M3 codes in bfloat16, exact."""
    if HARDWARE and not FNUZ:
        # By way of float32: float16 to bfloat16 is a slow instruction.
        value = bytes.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    else:
        value = decode_e4m3(bytes, FNUZ, HARDWARE)
    return value.to(tl.bfloat16)
