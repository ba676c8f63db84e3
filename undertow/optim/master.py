"""Full-precision weights behind bfloat16 parameters: kept whole, or as the 16 bits that the parameter lacks."""

from __future__ import annotations

import torch
from torch import Tensor

from undertow.optim.part import Part


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """float32 -> bfloat16 weight and int16 remainder, from which `join_master` makes the same float32 bits.

    The weight is the nearest bfloat16, halves away from zero, so that the remainder, signed, is the low half of the
    float32 as it stands. A NaN stays one, with another payload.
    """
    # Rounding carries upwards: a NaN with ones below would become a zero.
    bits = torch.where(master.isnan(), torch.nan, master).view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 that `split_master` divided."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def read_master(part: Part) -> Tensor:
    """Full-precision weights of a part, to be updated in place and then given to `write_master`."""
    if "remainder" in part.state:
        return join_master(part.weight, part.state["remainder"])
    return part.state.get("master", part.weight)


def write_master(part: Part, master: Tensor) -> None:
    """Bring the parameter, and what is kept beside it, to the updated `master`."""
    if "remainder" in part.state:
        weight, remainder = split_master(master)
        part.weight.copy_(weight)
        part.state["remainder"].copy_(remainder)
    elif "master" in part.state:
        part.weight.copy_(master)
