"""How a tensor is quantised: the type of its numbers, the blocks that share a scale, and the type of the scales."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from undertow.config.errors import InputError
from undertow.quant.blocks import Block, check_block
from undertow.quant.dialect import Dialect
from undertow.quant.formats import E2M1, E4M3, Format, e4m3

ScaleType = Literal["ue8m0", "float32"]

SCALE_TYPES: dict[ScaleType, torch.dtype] = {"ue8m0": torch.float8_e8m0fnu, "float32": torch.float32}


@dataclass(frozen=True)
class Scheme:
    """The type of the numbers (E4M3 of a dialect, or E2M1), their block and their scales.

    E2M1 comes as MXFP4 alone: 32 values of a row under a UE8M0 scale. Raises `InputError` for a scheme that is none.
    """

    format: Format
    block: Block
    scale: ScaleType = "ue8m0"

    def __post_init__(self) -> None:
        check_block(self.block)
        if not isinstance(self.scale, str) or self.scale not in SCALE_TYPES:
            raise InputError(f"scales of type {self.scale!r}: ue8m0 or float32 is expected")
        if not isinstance(self.format, Format):
            raise InputError(f"format {self.format!r}: E4M3, E4M3_FNUZ or E2M1 of undertow.quant.formats is expected")
        if not self.format.signed:
            raise InputError(f"{self.format.name} holds scales, not numbers; E4M3, E4M3_FNUZ or E2M1 is expected")
        if self.format is E2M1 and (self.block, self.scale) != (Block(1, 32), "ue8m0"):
            raise InputError(
                f"FP4 with blocks of {self.block} and {self.scale} scales: 1x32 and ue8m0 (MXFP4) are expected"
            )

    @property
    def dialect(self) -> Dialect | None:
        """Of FP8 numbers; None for MXFP4, which has one form."""
        return self.format.dialect

    def in_dialect(self, dialect: Dialect) -> Scheme:
        """The same scheme in a dialect; MXFP4 is itself."""
        return self if self.format.dialect is None else replace(self, format=e4m3(dialect))

    def __str__(self) -> str:
        return f"{self.format.name}, blocks of {self.block}, {self.scale} scales"


WEIGHTS = Scheme(E4M3, Block(128, 128))
"""FP8 weights of the release."""

ACTIVATIONS = Scheme(E4M3, Block(1, 128))
"""Inputs of FP8 matrix products; the release assumes a magnitude of at least 1e-4 in each block."""

CACHE = Scheme(E4M3, Block(1, 64))
"""The dimensions without rotation of a cache entry; at least 1e-4 as for activations."""

MXFP4 = Scheme(E2M1, Block(1, 32))
"""Routed experts of the release, and queries and keys of the indexer."""
