"""AdamW of bfloat16 weights with float32 ones behind them: a step reads and writes each number once."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from undertow.ops.triton.optimizer import tables
from undertow.ops.triton.optimizer.masters import TYPES, read_master, weight_address, write_master
from undertow.ops.triton.optimizer.tables import address, launches
from undertow.ops.triton.optimizer.tiles import tiles

_FLOATS = (torch.bfloat16, torch.float32)


class Weights(NamedTuple):
    """A bfloat16 parameter, its gradient, its moments, and what is behind it: float32 weights, or the int16 that it
    lacks to them (`undertow.optim.master`). All of one size."""

    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    behind: Tensor

    @property
    def kind(self) -> tuple[torch.dtype, ...]:
        """Types, beside the parameter's; one kind shares launches."""
        return self.grad.dtype, self.exp_avg.dtype, self.behind.dtype


@triton.jit
def _piece(
    row, i, inside, decay, rate, beta1, gain1, beta2, gain2, root, epsilon,
    GRAD: tl.constexpr, MOMENT: tl.constexpr, BEHIND: tl.constexpr,
):  # fmt: skip
    # The same elements for a thread in every tensor, or they would have to be exchanged.
    EACH: tl.constexpr = 128 // MOMENT.primitive_bitwidth
    weight = weight_address(row, 1, BEHIND, EACH)
    grad = address(row, 2, GRAD, EACH)
    first, second = address(row, 3, MOMENT, EACH), address(row, 4, MOMENT, EACH)
    behind = address(row, 5, BEHIND, EACH)
    g = tl.load(grad + i, inside).to(tl.float32)
    m = tl.load(first + i, inside).to(tl.float32) * beta1 + g * gain1
    v = tl.load(second + i, inside).to(tl.float32) * beta2 + g * g * gain2
    master = read_master(weight, behind, i, inside, BEHIND)
    # The approximate root takes what is below 1e-38 for zero, and the step of a tiny gradient would have no bound.
    master = master * decay - rate * m / (tl.sqrt_rn(v) / root + epsilon)
    tl.store(first + i, m.to(MOMENT), inside)
    tl.store(second + i, v.to(MOMENT), inside)
    write_master(master, weight, behind, i, inside, BEHIND)


@triton.jit
def adamw_update(
    table, decay, rate, beta1, gain1, beta2, gain2, root, epsilon,
    GRAD: tl.constexpr, MOMENT: tl.constexpr, BEHIND: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """CHUNK elements of the tensors in one row of the table."""
    row = table + tl.program_id(1) * 6
    size = tl.load(row)
    start = tl.program_id(0).to(tl.int64) * CHUNK
    i = start + tl.arange(0, CHUNK)
    if start + CHUNK <= size:  # apart, since without a mask a thread reads 16 bytes at once
        _piece(row, i, None, decay, rate, beta1, gain1, beta2, gain2, root, epsilon, GRAD, MOMENT, BEHIND)
    elif start < size:
        _piece(row, i, i < size, decay, rate, beta1, gain1, beta2, gain2, root, epsilon, GRAD, MOMENT, BEHIND)


def refusal(parts: Sequence[Weights]) -> str | None:
    """Why the kernel does not serve these parameters, or None if it does."""
    for part in parts:
        if part.weight.dtype != torch.bfloat16:
            return f"a parameter in {part.weight.dtype}: the kernel serves bfloat16"
        grad, moment, behind = part.kind
        if grad not in _FLOATS or moment not in _FLOATS or behind not in (torch.int16, torch.float32):
            return f"a gradient in {grad} and moments in {moment}: the kernel serves bfloat16 and float32"
        if reason := tables.refusal(part):
            return reason
    return None


def adamw(
    parts: Sequence[Weights], step: int, *, lr: float, betas: tuple[float, float], epsilon: float, weight_decay: float
) -> None:
    """The `step`-th update, counted from 1, of parameters on one device: the numbers of
    `undertow.optim.adamw.adamw_step`, to float32's rounding."""
    kinds: dict[tuple[torch.dtype, ...], list[Weights]] = {}
    for part in parts:
        kinds.setdefault(part.kind, []).append(part)
    for (grad, moment, behind), alike in kinds.items():
        tile = tiles(alike[0].weight.device, "adamw")
        for table, grid in launches(alike, tile["CHUNK"]):
            adamw_update[grid](
                table, 1 - lr * weight_decay, lr / (1 - betas[0] ** step), betas[0], 1 - betas[0], betas[1],
                1 - betas[1], math.sqrt(1 - betas[1] ** step), epsilon,
                GRAD=TYPES[grad], MOMENT=TYPES[moment], BEHIND=TYPES[behind], **tile,
            )  # fmt: skip
