"""Linear layer and cross-entropy in chunks of rows; the definition is `undertow.ops.reference.cross_entropy`.

Logits are float32: rounded to bfloat16, one of size 10 is off by 0.02, and with it the loss and the gradients of every
token that the model knows well. Their gradients are bfloat16, as the products take them.

The weight's gradient is summed over chunks in float32, unless the mean's has two at most: to round twice costs little,
where a second weight in float32 costs twice the gradient's own bytes. Gradients of single losses multiply hidden states
in bfloat16, which is a rounding more.
"""

# pyright: basic, reportArgumentType=false
# Sizes that a kernel is compiled for are of a type of their own.
from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.triton.cross_entropy.rows import cross_entropy_rows, scale_unless_one
from undertow.ops.triton.cross_entropy.tiles import tiles
from undertow.ops.triton.invariant.product import product as row_by_row
from undertow.ops.triton.products import matrix, product

_ROUNDED = 2
"""Most chunks of a mean whose products are added in the type of the weight's gradient."""


def refusal(
    hidden: Tensor, weight: Tensor, labels: Tensor, upstream: float = 1.0, *, invariant: bool = False
) -> str | None:
    """Why the kernels cannot serve a call with these operands, or None if they can."""
    for name, x in (("hidden states", hidden), ("the weight", weight)):
        if x.dtype != torch.bfloat16:
            return f"the kernels compute in bfloat16, and {name} of this call in {str(x.dtype).removeprefix('torch.')}"
    if labels.dtype != torch.int64:
        return f"labels are {str(labels.dtype).removeprefix('torch.')}, not int64"
    return "gradients cannot be made ahead for an upstream one of 0" if upstream == 0 else None


class _Batch:
    """What a pass over the rows works on: operands, and the results for each row."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float, normaliser: Tensor | None = None, *,
        invariant: bool = False,
    ):  # fmt: skip
        self.invariant = invariant
        self.hidden, self.weight, self.labels, self.z_loss = hidden, weight, labels, float(z_loss)
        self.known = normaliser is not None
        self.chunk = tiles(hidden.device, "chunk")
        self.normaliser = self._empty(len(hidden)) if normaliser is None else normaliser
        self.losses = None if self.known else self._empty(len(hidden))
        self._room: Tensor | None = None

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.hidden.device)

    def pass_rows(self, start: int, stop: int, slopes: Tensor | None) -> None:
        """Results of rows `start` to `stop`, and with `slopes` the gradients of their losses by logits into that."""
        vocabulary, size = len(self.weight), max(min(self.chunk["LOGITS"], len(self.hidden)), 1)
        if self._room is None:
            self._room = matrix(size, vocabulary, torch.float32, self.hidden.device)
        for first in range(start, stop, size):
            part = slice(first, min(first + size, stop))
            logits = self._room[: part.stop - first]
            if self.invariant:
                row_by_row(self.hidden[None, part], self.weight[None], logits[None])
            else:
                product(self.hidden[part], self.weight.t(), logits)
            made = None if slopes is None else slopes[first - start :]
            cross_entropy_rows[(len(logits),)](
                logits, self.labels[part], None if self.losses is None else self.losses[part], self.normaliser[part],
                made, logits.stride(0), 0 if made is None else made.stride(0), vocabulary, self.z_loss,
                KNOWN=self.known, LEARNS=made is not None, **tiles(logits.device, "rows"),
            )  # fmt: skip

    def gradients(
        self, of_hidden: bool, of_weight: bool, factor: float = 1.0, upstream: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of hidden and weight for `factor` times that of each loss, `upstream [N]` or 1; makes the results
        of rows on the way if they are not known."""
        rows, device = len(self.hidden), self.hidden.device
        chunks = max(triton.cdiv(rows, self.chunk["GRADIENTS"]), 1)
        size = min(triton.cdiv(rows, 8 * chunks) * 8, rows)
        held = torch.bfloat16 if chunks <= (_ROUNDED if upstream is None else 1) else torch.float32
        total = torch.empty(self.weight.shape, dtype=held, device=device) if of_weight else None
        grad_hidden = torch.empty(self.hidden.shape, dtype=torch.bfloat16, device=device) if of_hidden else None
        if rows:
            self._pass_chunks(size, grad_hidden, total, factor, upstream)
        elif total is not None:
            total.zero_()
        self._room = None
        return grad_hidden, None if total is None else total.to(torch.bfloat16)

    def _pass_chunks(
        self, size: int, grad_hidden: Tensor | None, total: Tensor | None, factor: float, upstream: Tensor | None
    ) -> None:
        slopes = matrix(size, len(self.weight), torch.bfloat16, self.hidden.device)
        exact = self._empty(size, self.hidden.shape[1])
        for start in range(0, len(self.hidden), size):
            part = slice(start, min(start + size, len(self.hidden)))
            made, of_part = slopes[: part.stop - start], exact[: part.stop - start]
            self.pass_rows(start, part.stop, made)
            each = factor if upstream is None else upstream[part, None] * factor
            if grad_hidden is not None:
                product(made, self.weight, of_part)  # the library may cut so long a sum, and would round its parts
                torch.mul(of_part, each, out=grad_hidden[part])
            if total is not None:
                scaled = self.hidden[part] if upstream is None else (self.hidden[part] * each).bfloat16()
                alone = factor if upstream is None else 1.0
                product(made.t(), scaled, total, add=start > 0, factor=alone)


def _results(hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float, invariant: bool) -> tuple[Tensor, Tensor]:
    batch = _Batch(hidden, weight, labels, z_loss, invariant=invariant)
    batch.pass_rows(0, len(hidden), None)
    assert batch.losses is not None
    return batch.losses, batch.normaliser


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float, invariant: bool
    ) -> tuple[Tensor, Tensor]:
        losses, normaliser = _results(hidden, weight, labels, z_loss, invariant)
        ctx.save_for_backward(hidden, weight, labels, normaliser)
        ctx.z_loss, ctx.invariant = z_loss, invariant
        ctx.mark_non_differentiable(normaliser)
        return losses, normaliser

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _: Tensor):  # type: ignore[override]
        hidden, weight, labels, normaliser = ctx.saved_tensors
        batch = _Batch(hidden, weight, labels, ctx.z_loss, normaliser, invariant=ctx.invariant)
        return *batch.gradients(*ctx.needs_input_grad[:2], upstream=grad), None, None, None


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, labels: Tensor, count: int, z_loss: float, upstream: float,
        invariant: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        batch = _Batch(hidden, weight, labels, z_loss, invariant=invariant)
        ctx.save_for_backward(*batch.gradients(*ctx.needs_input_grad[:2], factor=upstream / count))
        ctx.upstream = upstream
        ctx.mark_non_differentiable(batch.normaliser)
        assert batch.losses is not None
        return batch.losses.sum() / count, batch.normaliser

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _: Tensor):  # type: ignore[override]
        made, factor = ctx.saved_tensors, (grad / ctx.upstream).contiguous()
        for x in made:
            if x is not None and x.numel():
                tile = tiles(x.device, "scale")
                programs = min(tile.pop("PROGRAMS"), triton.cdiv(x.numel(), tile["BLOCK"]))
                scale_unless_one[(programs,)](x, factor, x.numel(), **tile)
                # They become the gradients themselves: a second backward pass is torch's error, not a wrong result.
                torch.autograd.graph.increment_version(x)
        return *made, None, None, None, None, None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float = 0.0, *, invariant: bool = False
) -> tuple[Tensor, Tensor]:
    """Loss and log-normaliser of each row, both `[N]` float32: as the reference's `linear_cross_entropy`.

    `hidden [N, d]`, `weight [V, d]` bfloat16, `labels [N]` int64. The backward pass makes the logits once more. A label
    outside the vocabulary gives a loss of NaN, where the reference raises. With `invariant` a row's results have the
    same bits whatever shares the call: its logits, and their sum from the first to the last, are its own.
    """
    return _Rows.apply(hidden.contiguous(), weight.contiguous(), labels.contiguous(), z_loss, invariant)


def linear_cross_entropy_mean(
    hidden: Tensor, weight: Tensor, labels: Tensor, count: int, z_loss: float = 0.0, upstream: float = 1.0, *,
    invariant: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Sum of the losses over `count` and the log-normalisers `[N]`: as the reference's `linear_cross_entropy_mean`.

    The forward pass makes the gradients, for an upstream one of `upstream`; those of the weight are kept until the
    backward pass, which multiplies them if it gets another.
    """
    operands = hidden.contiguous(), weight.contiguous(), labels.contiguous()
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _Mean.apply(*operands, count, z_loss, upstream, invariant)
    losses, normaliser = _results(*operands, z_loss, invariant)
    return losses.sum() / count, normaliser
