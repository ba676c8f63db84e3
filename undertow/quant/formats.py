"""Facts of the small floating-point types, and what each of their codes means."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from undertow.config.errors import InputError
from undertow.quant.dialect import Dialect


@dataclass(frozen=True)
class Format:
    """A small floating-point type.

    A code is sign (if any), exponent, `fraction_bits` of fraction, from the highest bit down. Exponent field 0 holds
    subnormals in types that have a zero. None of these types has an infinity. `dtype` is torch's label for the bytes
    (of E2M1: two codes a byte); `dialect` is None where there is only one.
    """

    name: str
    bits: int
    signed: bool
    fraction_bits: int
    bias: int
    largest: float
    nan_codes: tuple[int, ...]
    zero_codes: tuple[int, ...]
    dtype: torch.dtype
    dialect: Dialect | None = None

    @property
    def smallest_normal(self) -> float:
        """The smallest number with all its fraction bits."""
        return 2.0 ** (1 - self.bias if self.zero_codes else -self.bias)

    @property
    def step(self) -> float:
        """Distance between neighbours below `smallest_normal`, and so the smallest number above zero."""
        return self.smallest_normal / 2**self.fraction_bits

    def value(self, code: int) -> float:
        """The number that `code` stands for; NaN for the codes of NaN."""
        if code in self.nan_codes:
            return float("nan")
        negative = self.signed and code >> (self.bits - 1)
        magnitude = code & ((1 << (self.bits - self.signed)) - 1)
        exponent, fraction = divmod(magnitude, 1 << self.fraction_bits)
        if exponent == 0 and self.zero_codes:
            number = fraction * self.step
        else:
            number = (1 + fraction / 2**self.fraction_bits) * 2.0 ** (exponent - self.bias)
        return -number if negative else number


E4M3 = Format("e4m3", 8, True, 3, 7, 448.0, (0x7F, 0xFF), (0x00, 0x80), torch.float8_e4m3fn, "ocp")
E4M3_FNUZ = Format("e4m3fnuz", 8, True, 3, 8, 240.0, (0x80,), (0x00,), torch.float8_e4m3fnuz, "fnuz")
E2M1 = Format("e2m1", 4, True, 1, 1, 6.0, (), (0x0, 0x8), torch.float4_e2m1fn_x2)
UE8M0 = Format("ue8m0", 8, False, 0, 127, 2.0**127, (0xFF,), (), torch.float8_e8m0fnu)

FORMATS = (E4M3, E4M3_FNUZ, E2M1, UE8M0)


def e4m3(dialect: Dialect) -> Format:
    """The E4M3 of a dialect."""
    if dialect not in ("ocp", "fnuz"):
        raise InputError(f"FP8 dialect {dialect!r} is unknown; ocp or fnuz is expected")
    return E4M3 if dialect == "ocp" else E4M3_FNUZ


def format_of(dtype: torch.dtype) -> Format | None:
    """The format that torch's `dtype` labels; None for every other dtype, plain bytes among them."""
    return next((each for each in FORMATS if each.dtype is dtype), None)


@lru_cache(maxsize=32)
def table(format: Format, device: torch.device) -> Tensor:
    """The values of all codes of `format`, `[2^bits]` float32 on `device`. Exact: each of them is a float32."""
    return torch.tensor([format.value(code) for code in range(1 << format.bits)], device=device)
