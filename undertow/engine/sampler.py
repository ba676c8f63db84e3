"""From logits to the next token of each request: greedy, temperature, top-k and top-p, blind to the neighbours.

Probabilities are weighed in whole numbers: a token's mass is `round(exp((logit - max) / T) * 2^44)`. Integer sums
do not depend on their order, so a row draws the same token in any batch and at any place in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from undertow.config.errors import UndertowError
from undertow.engine.sampling import SamplingParams

# Sums of fewer than 2^19 tokens fit 64 bits; a token 2^45 times rarer than the likeliest is never drawn.
MASS_BITS = 44


@dataclass(frozen=True)
class Sampled:
    """The chosen tokens: `ids` [B] int64 and `logprobs` [B] float64, log-softmax of the raw logits at those ids."""

    ids: Tensor
    logprobs: Tensor


def sample(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Sampled:
    """Choose one token for each row of `logits` [B, V]; `uniforms` holds one number in [0, 1) a row.

    Log-probabilities are those of the model: before temperature and filters, in nats. Raises `UndertowError` naming the
    rows and how many of their logits are not finite.
    """
    _refuse_non_finite(logits)
    scores = logits.double()
    raw = _masses(scores, torch.ones(len(params), dtype=torch.float64, device=logits.device))
    ids = scores.argmax(-1)
    drawing = [row for row, p in enumerate(params) if p.temperature > 0]
    if drawing:
        at = torch.tensor(drawing, device=logits.device)
        ids[at] = _draw(scores[at], [params[row] for row in drawing], [uniforms[row] for row in drawing])
    return Sampled(ids, _logprobs(scores, raw, ids))


def _refuse_non_finite(logits: Tensor) -> None:
    bad = (~logits.isfinite()).sum(-1)
    if bad.any():
        rows = ", ".join(f"row {row}: {count} of {logits.shape[-1]}" for row, count in enumerate(bad.tolist()) if count)
        raise UndertowError(
            f"the model gave logits that are not finite ({rows}) and nothing is sampled from them:"
            " check the weights and the dtype"
        )


def _masses(scores: Tensor, temperature: Tensor) -> Tensor:
    """[B, V] int64, the likeliest token of a row weighing 2^44."""
    relative = (scores - scores.amax(-1, keepdim=True)) / temperature[:, None]
    return (relative.exp() * 2.0**MASS_BITS).round().long()


def _draw(scores: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=scores.device)

    masses = _masses(scores, column([p.temperature for p in params]))
    if any(p.top_k or p.top_p < 1 for p in params):
        masses = _filtered(
            scores, masses, column([p.top_k or masses.shape[-1] for p in params]), column([p.top_p for p in params])
        )
    running = masses.cumsum(-1)
    # A float64 below 1 is at most 1 - 2^-53, which keeps the rounded product below the sum itself. Drawn in vocabulary
    # order whatever the filters, so that a neighbour's filter cannot change this row's path.
    target = (column(list(uniforms))[:, None] * running[:, -1:].double()).long()
    return torch.searchsorted(running, target, right=True).squeeze(-1)


def _filtered(scores: Tensor, masses: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`masses` with every token outside top-k, then outside the smallest prefix of mass top-p, set to zero."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    ranked = masses.gather(-1, order)
    rank = torch.arange(masses.shape[-1], device=masses.device)
    ranked = ranked.where(rank < top_k[:, None], 0)
    before = ranked.cumsum(-1) - ranked
    wanted = top_p[:, None] * ranked.sum(-1, keepdim=True).double()
    kept = (before.double() < wanted) | (top_p[:, None] == 1)
    return torch.zeros_like(masses).scatter_(-1, order, ranked.where(kept, 0))


def _logprobs(scores: Tensor, raw: Tensor, ids: Tensor) -> Tensor:
    chosen = scores.gather(-1, ids[:, None]).squeeze(-1) - scores.amax(-1)
    return chosen - (raw.sum(-1).double() * 2.0**-MASS_BITS).log()
