"""What codes and roundings ought to be, from two sources that share nothing with the package."""

from __future__ import annotations

import itertools
from fractions import Fraction

import ml_dtypes
import numpy as np
import torch

from undertow.quant.formats import E2M1, E4M3, E4M3_FNUZ, UE8M0

TYPES = {
    E4M3: ml_dtypes.float8_e4m3fn,
    E4M3_FNUZ: ml_dtypes.float8_e4m3fnuz,
    E2M1: ml_dtypes.float4_e2m1fn,
    UE8M0: ml_dtypes.float8_e8m0fnu,
}

# Written out from the published definitions of the types, positive half, steps of the smallest number above zero.
_E4M3_STEPS = [*range(16), *(m << e for e in range(1, 15) for m in range(8, 16))]
POSITIVE = {
    E4M3: [Fraction(step, 512) for step in _E4M3_STEPS[:127]],
    E4M3_FNUZ: [Fraction(step, 1024) for step in _E4M3_STEPS],
    E2M1: [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)],
}


def decoded(format) -> torch.Tensor:
    """The values of all codes as ml_dtypes has them, float32."""
    codes = np.arange(1 << format.bits, dtype=np.uint8)
    return torch.from_numpy(codes.view(TYPES[format]).astype(np.float32))


def encoded(values: torch.Tensor, format) -> torch.Tensor:
    """The codes of `values` as ml_dtypes rounds them; NaN above the largest, where this package clamps."""
    with np.errstate(invalid="ignore"):  # NaN among them is meant
        return torch.from_numpy(values.numpy().astype(TYPES[format]).view(np.uint8).copy())


def nearest(value: float, format) -> int:
    """The code of a finite `value` by exact arithmetic: nearest number, ties to the even code, the largest above it."""
    positive = POSITIVE[format]
    magnitude = abs(Fraction(value))
    code = min(range(len(positive)), key=lambda c: (abs(positive[c] - magnitude), c % 2))
    negative = np.signbit(value) and (code > 0 or format is not E4M3_FNUZ)
    return code | (negative << (format.bits - 1))


def steps(format) -> list[tuple[Fraction, Fraction]]:
    """Each two neighbours among the numbers from zero up."""
    return list(itertools.pairwise(POSITIVE[format]))


def boundaries(format) -> torch.Tensor:
    """Every number, every tie between two, and their next float32 on either side, with both signs.

    Rounding never decreases, so an encoder that is right on these is right on every float32 between them.
    """
    positive = [float(number) for number in POSITIVE[format]]
    ties = [float((low + high) / 2) for low, high in steps(format)]
    beyond = [positive[-1] + (positive[-1] - positive[-2]) / 2, positive[-1] * 2]
    exact = torch.tensor([*positive, *ties, *beyond])
    infinity = torch.tensor(float("inf"))
    around = torch.cat([exact, torch.nextafter(exact, infinity), torch.nextafter(exact, -infinity)])
    return torch.cat([around, -around])
