"""Expert choice and weights (model card 6): scores `sqrt(softplus(logit))`, top-k of score + bias, weights from
scores."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.reference.precision import wide

# Below the least positive score in float32, 3.7e-23: changes none, makes weights zero where all chosen ones underflow.
FLOOR = 1e-24


class _SqrtSoftplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        softplus = torch.where(x > 20.0, x, torch.log1p(torch.exp(x.clamp(max=20.0))))
        score = softplus.sqrt_()
        ctx.save_for_backward(score)
        return score

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        (score,) = ctx.saved_tensors
        # sigmoid(x) = 1 - exp(-softplus(x)), which keeps its digits where sigmoid itself underflows.
        return grad * (-torch.expm1(-score.square()) / (2.0 * score).clamp(min=FLOOR))


def sqrt_softplus(x: Tensor) -> Tensor:
    """`sqrt(softplus(x))`, softplus linear above 20; the gradient is the closed form, finite where autograd's is
    NaN."""
    return _SqrtSoftplus.apply(x)


def stable_topk(scores: Tensor, k: int) -> Tensor:
    """Indices `[..., k]` of the largest entries of the last dimension, the lowest index first among equal ones."""
    return torch.sort(scores, dim=-1, descending=True, stable=True)[1][..., :k]


def route(
    logits: Tensor, bias: Tensor | None, k: int, scale: float, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Router tail: `logits [T, E]` float32 -> indices `[T, k]` int64, weights `[T, k]`, scores `[T, E]` (float32).

    `bias [E]` moves the choice but not the weights; `chosen [T, k]` replaces the choice (hash layers, replay).
    Weights are `scale * score / sum of chosen scores`.
    """
    scores = sqrt_softplus(wide(logits))
    if chosen is None:
        selection = scores.detach() if bias is None else scores.detach() + bias
        chosen = stable_topk(selection, k)
    picked = scores.gather(-1, chosen)
    total = picked[:, :1].clone()
    for i in range(1, picked.shape[-1]):
        total = total + picked[:, i : i + 1]
    return chosen, picked / total.clamp(min=FLOOR) * scale, scores
