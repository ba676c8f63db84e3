"""Float32 weights behind bfloat16 parameters, read and written as `undertow.optim.master` has them."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import torch
import triton
import triton.language as tl

from undertow.ops.triton.optimizer.tables import address

TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.int16: tl.int16}
"""Torch's types that the optimizer's kernels take, in the language of kernels."""


@triton.jit
def weight_address(row, column, BEHIND: tl.constexpr, EACH: tl.constexpr):
    """The parameter in a column of a table's row: as int16 where int16 is behind it, as float32 where nothing is."""
    if BEHIND is None:
        pointer = address(row, column, tl.float32, EACH)
    elif BEHIND == tl.int16:  # noqa: SIM300 - it is no constant
        pointer = address(row, column, tl.int16, EACH)
    else:
        pointer = address(row, column, tl.bfloat16, EACH)
    return pointer


@triton.jit
def read_master(weight, behind, i, inside, BEHIND: tl.constexpr):
    """Float32 weights `i`: the parameter's own (BEHIND None), those behind it, or joined with the int16 behind it."""
    if BEHIND is None:
        master = tl.load(weight + i, inside)
    elif BEHIND == tl.int16:  # noqa: SIM300 - it is no constant
        high = tl.load(weight + i, inside).to(tl.int32) << 16
        master = (high + tl.load(behind + i, inside).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        master = tl.load(behind + i, inside)
    return master


@triton.jit
def write_master(master, weight, behind, i, inside, BEHIND: tl.constexpr):
    """Bring the parameter, and what is behind it, to the updated weights."""
    if BEHIND is None:
        tl.store(weight + i, master, inside)
    elif BEHIND == tl.int16:  # noqa: SIM300 - it is no constant
        # Rounding carries upwards: a NaN with ones below would become a zero.
        bits = tl.where(master != master, 0x7FC00000, master.to(tl.int32, bitcast=True))
        high = (bits + 0x8000) >> 16
        tl.store(weight + i, high.to(tl.int16), inside)
        tl.store(behind + i, (bits - (high << 16)).to(tl.int16), inside)
    else:
        tl.store(weight + i, master.to(tl.bfloat16), inside)
        tl.store(behind + i, master, inside)
