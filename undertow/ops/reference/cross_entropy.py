"""Linear layer and cross-entropy in one, in chunks of rows: the logits of a batch never exist at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.reference.linear import TILE, tiled_product
from undertow.ops.reference.precision import twinned, wide

IGNORE = -100
_CHUNK_ELEMENTS = 1 << 22


def _rows_per_chunk(vocabulary: int) -> int:
    return max(TILE, _CHUNK_ELEMENTS // vocabulary // TILE * TILE)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float, invariant: bool):
        w = wide(weight)
        loss, lse = (torch.zeros(len(hidden), dtype=w.dtype, device=hidden.device) for _ in range(2))
        step = _rows_per_chunk(len(weight))
        for start in range(0, len(hidden), step):
            part = slice(start, start + step)
            h = wide(hidden[part])
            logits = tiled_product(h, w) if invariant else h @ w.t()
            lse[part] = torch.logsumexp(twinned(logits), -1)[: len(h)]
            picked = logits.gather(-1, labels[part, None].clamp(min=0))[:, 0]
            loss[part] = lse[part] - picked + z_loss * lse[part].square()
        ctx.save_for_backward(hidden, weight, labels, lse)
        ctx.z_loss = z_loss
        ignored = labels == IGNORE
        normaliser = lse.masked_fill(ignored, 0.0)
        ctx.mark_non_differentiable(normaliser)
        return loss.masked_fill_(ignored, 0.0), normaliser

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _: Tensor):  # type: ignore[override]
        hidden, weight, labels, lse = ctx.saved_tensors
        w = wide(weight)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(w)
        grad = grad.masked_fill(labels == IGNORE, 0.0)
        step = _rows_per_chunk(len(weight))
        for start in range(0, len(hidden), step):
            part = slice(start, start + step)
            h, g = wide(hidden[part]), grad[part, None]
            d = (h @ w.t()).sub_(lse[part, None]).exp_()
            d.mul_(g * (1.0 + 2.0 * ctx.z_loss * lse[part, None]))
            d.scatter_add_(-1, labels[part, None].clamp(min=0), -g)
            grad_hidden[part] = (d @ w).to(hidden.dtype)
            grad_weight.addmm_(d.t(), h)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float = 0.0, *, invariant: bool = False
) -> tuple[Tensor, Tensor]:
    """Loss and log-normaliser of each row in nats: `hidden [N, d]`, `weight [V, d]`, `labels [N]` int64 -> two `[N]`
    float32.

    A label of -100 gives 0 twice and no gradient. `z_loss` adds that multiple of the squared log-normaliser to the
    loss; without it the negative of the loss is the log-probability of the label. The log-normaliser is not
    differentiable.
    """
    return _LinearCrossEntropy.apply(hidden, weight, labels, z_loss, invariant)


def linear_cross_entropy_mean(
    hidden: Tensor, weight: Tensor, labels: Tensor, count: int, z_loss: float = 0.0, upstream: float = 1.0, *,
    invariant: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The sum of the losses over `count`, and the log-normaliser of each row `[N]`; see `linear_cross_entropy`.

    `upstream` is the gradient that the mean is expected to get: a kernel may make its own gradients ahead for that.
    The result does not depend on it.
    """
    losses, normaliser = linear_cross_entropy(hidden, weight, labels, z_loss, invariant=invariant)
    return losses.sum() / count, normaliser
