"""Small floating-point types inside kernels: float32 to codes and back, as `undertow.quant.codec` defines them.

By integers alone, so that every chip gives the same bits, or, where `hardware` says that the chip has OCP's E4M3, by
its own conversion instructions.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def encode_e4m3(x, hardware: tl.constexpr):
    """Codes (uint8) of float32 magnitudes up to 448 and their signs, to nearest even, in OCP's E4M3; -0 and NaN become
    0."""
    # Up to half a step all goes to zero, which has no sign here; NaN compares as if it did.
    x = tl.where(tl.abs(x) > 0.0009765625, x, 0.0)
    if hardware:
        codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        codes = _encode(x, 3, 7, 0x3C800000, 0x46800000, 7)  # smallest normal 2^-6, binade of steps of 2^-9: 2^14
    return codes


@triton.jit
def encode_e2m1(x):
    """Codes below 16 (uint8) of float32 magnitudes up to 6 and their signs, to nearest even, in E2M1."""
    return _encode(x, 1, 1, 0x3F800000, 0x4A800000, 3)  # smallest normal 1, binade of steps of 1/2: 2^22


@triton.jit
def _encode(
    x, FRACTION: tl.constexpr, BIAS: tl.constexpr, NORMAL: tl.constexpr, BINADE: tl.constexpr, SIGN: tl.constexpr
):
    """`NORMAL` and `BINADE` are bits of float32; `SIGN` is the place of the sign bit."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    shift: tl.constexpr = 23 - FRACTION
    half: tl.constexpr = (1 << (22 - FRACTION)) - 1
    gap: tl.constexpr = (127 - BIAS) << FRACTION
    normal = ((magnitude + ((magnitude >> shift) & 1) + half) >> shift) - gap
    # In the binade where the last bit of a float32 is one step, its addition rounds to whole steps, ties to even.
    binade = tl.full(magnitude.shape, BINADE, tl.int32)
    sum = magnitude.to(tl.float32, bitcast=True) + binade.to(tl.float32, bitcast=True)
    small = sum.to(tl.int32, bitcast=True) - BINADE
    codes = tl.where(magnitude < NORMAL, small, normal)
    return (codes | ((bits >> 31) & 1) << SIGN).to(tl.uint8)


@triton.jit
def decode_e4m3(codes, fnuz: tl.constexpr, hardware: tl.constexpr):
    """Float32 values of E4M3 codes (uint8) of either dialect, exact; NaN codes give NaN."""
    if hardware:
        value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        if fnuz:
            # The same byte is half as much, but for OCP's NaN and FNUZ's, which is OCP's -0.
            value = tl.where((codes & 0x7F) == 0x7F, tl.where(codes == 0x7F, 480.0, -480.0), value) * 0.5
            value = tl.where(codes == 0x80, float("nan"), value)
    else:
        value = _decode_e4m3(codes, fnuz)
    return value


@triton.jit
def _decode_e4m3(codes, fnuz: tl.constexpr):
    magnitude = (codes & 0x7F).to(tl.int32)
    bias: tl.constexpr = 8 if fnuz else 7
    normal = ((magnitude << 20) + ((127 - bias) << 23)).to(tl.float32, bitcast=True)
    # Below the normal numbers: one binade higher, less what its first bit adds.
    least: tl.constexpr = 0.0078125 if fnuz else 0.015625
    above = ((magnitude << 20) + ((128 - bias) << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, above - least, normal)
    value = tl.where(codes >= 0x80, -value, value)
    nan = codes == 0x80 if fnuz else magnitude == 0x7F
    return tl.where(nan, float("nan"), value)


@triton.jit
def decode_e2m1(codes):
    """Float32 values of E2M1 codes (uint8, below 16), exact."""
    magnitude = (codes & 7).to(tl.int32)
    # From 1 on, exponent and fraction lie where float32 has them; below there are 0 and 1/2.
    bits = tl.where(magnitude < 2, magnitude * 0x3F000000, (magnitude << 22) + 0x3F000000)
    value = bits.to(tl.float32, bitcast=True)
    return tl.where(codes >= 8, -value, value)


@triton.jit
def divide(x, divisor, ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """`x` `[ROWS, GROUPS, GROUP]` by positive `divisor` `[.., GROUPS]` of normal float32, correctly rounded.

    A quotient by the rounded reciprocal is right after one correction with its exact remainder (Markstein 1990), unless
    the remainder is below the smallest numbers: so the divisor is brought to between 1 and 2 first.
    """
    bits = divisor.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    power = power_of_two(254 - (bits >> 23))
    reciprocal = tl.broadcast_to(tl.div_rn(1.0, mantissa)[:, :, None], (ROWS, GROUPS, GROUP))
    mantissa = tl.broadcast_to(mantissa[:, :, None], (ROWS, GROUPS, GROUP))
    x = x * power[:, :, None]
    quotient = x * reciprocal
    return tl.fma(tl.fma(-quotient, mantissa, x), reciprocal, quotient)


@triton.jit
def power_of_two(code):
    """Float32 value of UE8M0 codes (int32): 2^(code - 127), NaN for 255."""
    # 2^-127 is below the normal numbers, whose exponent field would be 0.
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def ceiling_code(magnitude, LIMIT: tl.constexpr):
    """UE8M0 codes (int32) of the smallest powers of two, 2^-126 or more, by which magnitudes come down to a limit.

    `magnitude` and `LIMIT` are bits of float32. Zero gives 1 (code 127), an infinity or NaN gives NaN (255).
    """
    exponent: tl.constexpr = LIMIT >> 23
    fraction: tl.constexpr = LIMIT & 0x7FFFFF
    code = (magnitude >> 23) - exponent + 127 + ((magnitude & 0x7FFFFF) > fraction).to(tl.int32)
    code = tl.minimum(tl.maximum(code, 1), 254)
    code = tl.where(magnitude == 0, 127, code)
    return tl.where(magnitude >= 0x7F800000, 255, code)
