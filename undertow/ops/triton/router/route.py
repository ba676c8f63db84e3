"""Scores, choice and weights of experts in one kernel, and the gradient of the logits in another.

The definition is `undertow.ops.reference.router`. Scores are made by the functions of the chip's mathematical library,
which torch calls too, for a choice depends on their last bit; exp's results below the least normal number, which the
library may take for 0, are rounded here.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.language.extra import libdevice

from undertow.ops.reference.router import FLOOR
from undertow.ops.triton.router.tiles import tiles

EXPERTS = 1024
CHOICES = 16
WIDTH = 128
"""Experts of a token that a warp asks for at once: four for each of its 32 lanes."""
SLOTS = 32
"""Choices of a token in a warp: one for each lane, K of them true."""

_FLOOR = tl.constexpr(FLOOR)
_DEEP = tl.constexpr(-87.0)
"""Below it exp(x) is next to no normal number, or none."""
_RAISED = tl.constexpr(64.0)
_LOWERED = tl.constexpr(1.603810890548638e-28)
"""exp(-64)."""
_FAINT = tl.constexpr(2.0**-13)
"""Below it 1 - exp(-score^2) is score^2, to the last bit."""
_LEAST = tl.constexpr(-0x80000000)
_MOST = tl.constexpr(0x7FFFFFFF)
_NAN = tl.constexpr(0x7FFFFFFE)


def refusal(logits: Tensor, k: int) -> str | None:
    """Why the kernels cannot serve a call with these operands, or None if they can."""
    experts = logits.shape[-1]
    if logits.dtype != torch.float32 or logits.dim() != 2:
        return f"logits are {logits.dim()}-dimensional {_type(logits)}; they must be [tokens, experts] in float32"
    if experts > EXPERTS:
        return f"{experts} experts, more than {EXPERTS}"
    if not 1 <= k <= min(experts, CHOICES):
        return f"{k} choices of {experts} experts, not 1 to {min(experts, CHOICES)}"
    return None


def _type(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


@triton.jit
def _usual(x):
    """sqrt(softplus(x)), softplus linear above 20, where exp(x) is a normal number."""
    return tl.sqrt_rn(tl.where(x > 20.0, x, libdevice.log1p(libdevice.exp(tl.where(x > 20.0, 20.0, x)))))


@triton.jit
def _deep(x, score):
    """`score`, with what it should be where exp(x) is no normal number."""
    power = libdevice.exp(tl.where(x < _DEEP, x + _RAISED, 0.0))
    # The first product rounds as exp does where numbers are not normal; the root is taken of normal ones.
    faint = (power * _LOWERED) * 1.8446744073709552e19
    return tl.where(x < _DEEP, tl.sqrt_rn(faint) * 2.3283064365386963e-10, score)


@triton.jit
def _ordered(x):
    """int32 above the least one, in the order of float32 `x`: NaN above all, zeros of both signs equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, _NAN, bits ^ ((bits >> 31) & _MOST))


@triton.jit
def _floored(total):
    """At least the floor, and NaN where it is NaN: a maximum that hides it would leave weights of 1e24."""
    return tl.maximum(total, _FLOOR, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _best(key, e, FAR: tl.constexpr):
    """The lowest number among those of the largest key of each row, `[ROWS]`, of `[PARTS, ROWS, WIDTH]`."""
    most = tl.max(tl.max(key, 0), 1)
    return tl.min(tl.min(tl.where(key == most[None, :, None], e, FAR), 0), 1)


@triton.jit(do_not_specialize=["tokens"])
def route_forward(
    logits, bias, chosen, indices, weights, scores, tokens, scale,
    E: tl.constexpr, K: tl.constexpr, BIASED: tl.constexpr, GIVEN: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """ROWS tokens: their scores, the K best of score + bias unless `chosen` is GIVEN, and the weights of those."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # The rows stand between the two halves of a column's number, so that each gets a warp, which has no other to wait
    # for.
    e = (tl.arange(0, PARTS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])[:, None, :]
    inside = row < tokens
    here = inside[None, :, None] & (e < E)
    at = row.to(tl.int64)[None, :, None] * E + e
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(logits + at, here, other=0.0)
    if BIASED and not GIVEN:
        # In the form of the logits, so that nothing need move.
        push = tl.load(tl.broadcast_to(bias + e, (PARTS, ROWS, WIDTH)), here, other=0.0).to(tl.float32)
    score = _usual(x)
    # Next to no program has such a logit.
    if tl.max(tl.ravel((x < _DEEP).to(tl.int32)), 0) > 0:
        score = _deep(x, score)
    tl.store(scores + at, score, here)
    slot = tl.arange(0, SLOTS)[None, :]
    keep = inside[:, None] & (slot < K)
    own = row.to(tl.int64)[:, None] * K + slot
    if GIVEN:
        number = tl.load(chosen + own, keep, other=0).to(tl.int32)
    else:
        selection = score
        if BIASED:
            selection += push
        key = tl.where(e < E, _ordered(selection), _LEAST)
        number = tl.zeros((ROWS, SLOTS), tl.int32)
        for i in tl.static_range(K):
            n = _best(key, e, PARTS * WIDTH)
            key = tl.where(e == n[None, :, None], _LEAST, key)
            number = tl.where(slot == i, n[:, None], number)
        tl.store(indices + own, number.to(tl.int64), keep)
    # To make a few scores again takes less time than to look for them among the others in each of the rounds.
    x = tl.load(logits + row.to(tl.int64)[:, None] * E + number, keep, other=0.0)
    picked = tl.where(keep, _deep(x, _usual(x)), 0.0)
    total = _floored(tl.sum(picked, 1))[:, None] + tl.zeros((ROWS, SLOTS), tl.float32)
    tl.store(weights + own, tl.div_rn(picked, total) * scale, keep)


@triton.jit
def _slope(grad_weights, scores, chosen, own, base, inside, i, total, scale):
    """Number of the i-th choice, the gradient of its share of the total, and that share."""
    n = tl.load(chosen + own + i, inside, other=0).to(tl.int64)
    score = tl.load(scores + base + n, inside, other=0.0)
    return n, tl.load(grad_weights + own + i, inside, other=0.0) * scale / total, score / total


@triton.jit(do_not_specialize=["tokens"])
def route_backward(
    scores, chosen, grad_weights, grad_scores, out, tokens, scale,
    E: tl.constexpr, K: tl.constexpr, WEIGHTED: tl.constexpr, SCORED: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS tokens: the gradient of the logits from those of weights and scores, as far as there are any."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, COLUMNS)[None, :]
    inside = row < tokens
    here = inside[:, None] & (e < E)
    base = row.to(tl.int64) * E
    at = base[:, None] + e
    score = tl.load(scores + at, here, other=0.0)
    grad = tl.zeros((ROWS, COLUMNS), tl.float32)
    if SCORED:
        grad += tl.load(grad_scores + at, here, other=0.0)
    if WEIGHTED:
        own = row.to(tl.int64) * K
        chosen_sum = tl.zeros((ROWS,), tl.float32)
        for i in tl.static_range(K):
            n = tl.load(chosen + own + i, inside, other=0).to(tl.int64)
            chosen_sum += tl.load(scores + base + n, inside, other=0.0)
        total = _floored(chosen_sum)
        common = tl.zeros((ROWS,), tl.float32)
        for i in tl.static_range(K):
            _n, slope, share = _slope(grad_weights, scores, chosen, own, base, inside, i, total, scale)
            common += slope * share
        common = tl.where(chosen_sum >= _FLOOR, common, 0.0)
        for i in tl.static_range(K):
            n, slope, _share = _slope(grad_weights, scores, chosen, own, base, inside, i, total, scale)
            grad += tl.where(e == n[:, None], (slope - common)[:, None], 0.0)
    # sigmoid(x) = 1 - exp(-softplus(x)), which keeps its digits where sigmoid itself underflows; where its square is
    # no normal number, which a GPU takes for 0, half the score is the same.
    grad *= tl.where(score < _FAINT, 0.5 * score, -libdevice.expm1(-score * score) / tl.maximum(2.0 * score, _FAINT))
    tl.store(out + at, grad, here)


def choose(
    logits: Tensor, bias: Tensor | None, k: int, scale: float, chosen: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `route`, without gradients, of operands whose rows lie end to end."""
    (tokens, experts), device = logits.shape, logits.device
    indices = torch.empty((tokens, k), dtype=torch.int64, device=device) if chosen is None else chosen
    weights = torch.empty((tokens, k), dtype=torch.float32, device=device)
    scores = torch.empty((tokens, experts), dtype=torch.float32, device=device)
    tile, columns = tiles(device, "forward"), triton.next_power_of_2(experts)
    early = {"launch_pdl": True} if tile["EARLY"] else {}
    if tokens:
        route_forward[(triton.cdiv(tokens, tile["ROWS"]),)](
            logits, bias, chosen, indices, weights, scores, tokens, scale,
            E=experts, K=k, BIASED=bias is not None, GIVEN=chosen is not None,
            PARTS=triton.cdiv(columns, WIDTH), WIDTH=min(columns, WIDTH), SLOTS=SLOTS, **tile, **early,
        )  # fmt: skip
    return indices, weights, scores


def gradient(
    scores: Tensor, indices: Tensor, grad_weights: Tensor | None, grad_scores: Tensor | None, scale: float
) -> Tensor:
    """That of the logits `[T, E]`, from those of weights and scores, of which one may be absent."""
    tokens, experts = scores.shape
    out = torch.empty((tokens, experts), dtype=torch.float32, device=scores.device)
    tile = tiles(scores.device, "backward")
    if tokens:
        route_backward[(triton.cdiv(tokens, tile["ROWS"]),)](
            scores, indices, grad_weights, grad_scores, out, tokens, scale,
            E=experts, K=indices.shape[1], WEIGHTED=grad_weights is not None, SCORED=grad_scores is not None,
            COLUMNS=triton.next_power_of_2(experts), **tile,
        )  # fmt: skip
    return out


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, bias: Tensor | None, k: int, scale: float, chosen: Tensor | None):
        indices, weights, scores = choose(logits, bias, k, scale, chosen)
        ctx.save_for_backward(scores, indices)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        if chosen is not None:
            return None, weights, scores
        ctx.mark_non_differentiable(indices)
        return indices, weights, scores

    @staticmethod
    @once_differentiable
    def backward(ctx, _indices, grad_weights: Tensor | None, grad_scores: Tensor | None):  # type: ignore[override]
        scores, indices = ctx.saved_tensors
        if grad_weights is None and grad_scores is None:
            return None, None, None, None, None
        return gradient(scores, indices, _whole(grad_weights), _whole(grad_scores), ctx.scale), None, None, None, None


def _whole(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def route(
    logits: Tensor, bias: Tensor | None, k: int, scale: float, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Router tail: `logits [T, E]` float32 -> indices `[T, k]` int64, weights `[T, k]`, scores `[T, E]` (float32).

    `bias [E]` moves the choice but not the weights; of equal sums the lowest expert is chosen. `chosen [T, k]` replaces
    the choice, and is returned as it is. Saved for backward: scores and choice.
    """
    detached = None if bias is None else bias.detach().contiguous()
    indices, weights, scores = _Route.apply(logits.contiguous(), detached, k, float(scale), _whole(chosen))
    return indices if chosen is None else chosen, weights, scores
