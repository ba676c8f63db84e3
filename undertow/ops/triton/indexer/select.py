"""The indexer's scores and choice in Triton: scores of a run of tokens, then the best of each token, run after run.

The definition is `undertow.ops.reference.indexer`. A choice is a set: here its numbers ascend, which is kind to whoever
reads the entries, where the reference has the best first.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.segments import Rows, Segments, end_to_end
from undertow.ops.triton.attention.descriptors import aligned
from undertow.ops.triton.attention.geometry import sight
from undertow.ops.triton.indexer.gradients import Gradients
from undertow.ops.triton.indexer.runs import Run, equal_runs, runs
from undertow.ops.triton.indexer.scoring import scores_of
from undertow.ops.triton.indexer.top_k import choose_best

HEADS = (16, 32, 64)
WIDTHS = (16, 32, 64, 128)


def refusal(q: Tensor, keys: Rows, weights: Tensor, segments: Segments, *, invariant: bool = False) -> str | None:
    """Why the kernels cannot serve a call with these operands, or None if they can."""
    if invariant:
        return "the kernels' results depend on the other documents of a call, and batch_invariant is on"
    if any(segments.past):
        return "documents have a past"
    if not end_to_end(keys):
        return "the kernels take the rows of this call end to end, not from a pool"
    if q.dtype != torch.bfloat16 or keys.data.dtype != torch.bfloat16:
        return f"index queries are {type_of(q)} and keys {type_of(keys.data)}; both must be bfloat16"
    if weights.dtype not in (torch.bfloat16, torch.float32):
        return f"head weights are {type_of(weights)}, neither bfloat16 nor float32"
    if q.shape[1] not in HEADS:
        return f"{q.shape[1]} index heads, not one of {', '.join(map(str, HEADS))}"
    if q.shape[2] not in WIDTHS:
        return f"index heads of {q.shape[2]} numbers, not one of {', '.join(map(str, WIDTHS))}"
    return None


def type_of(x: Tensor) -> str:
    """A tensor's type as messages name it."""
    return str(x.dtype).removeprefix("torch.")


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, keys: Tensor, weights: Tensor, segments: Segments, ratio: int) -> Tensor:
        longest = max((n // ratio for n in segments.new), default=0)
        out = torch.full((segments.tokens, longest), -torch.inf, dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, keys, weights)
        ctx.segments, ctx.ratio = segments, ratio
        for run in equal_runs(segments.tokens, longest, segments.tokens * max(longest, 1)):
            scores_of(q, keys, weights, segments, ratio, run, out[run.start : run.stop])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        q, keys, weights = ctx.saved_tensors
        gradients = Gradients(q, keys, weights, ctx.segments, ctx.ratio)
        tokens, longest = grad.shape
        gradients.add(Run(0, tokens, longest), grad.contiguous())
        return *gradients.result(), None, None


def indexer_scores(
    q: Tensor, keys: Rows, weights: Tensor, segments: Segments, ratio: int, *, invariant: bool = False
) -> Tensor:
    """All scores at once, `[T, N]` float32 with `N` the longest document's entries and `-inf` where not visible: for
    short inputs. Operands as in `indexer_select`; all three get gradients."""
    return _Scores.apply(aligned(q), aligned(keys.data), weights.contiguous(), segments, ratio)


@torch.no_grad()
def indexer_select(
    q: Tensor, keys: Rows, weights: Tensor, k: int, segments: Segments, ratio: int, *, invariant: bool = False
) -> Tensor:
    """Entries each query keeps: `[T, k]` int64 numbers within the document, ascending, then -1 where fewer than `k`
    are visible.

    `q [T, h, c]` and `keys` rows `[N, c]` bfloat16, `weights [T, h]`, already scaled, bfloat16 or float32. Of equal
    scores the lowest entries are kept. `invariant` must be off, see `refusal`.
    """
    return _select(q, keys.data, weights, None, k, segments, ratio)


@torch.no_grad()
def indexer_select_fp8(
    q: Tensor, q_scales: Tensor, keys: Tensor, key_scales: Tensor, weights: Tensor, k: int, segments: Segments,
    ratio: int,
) -> Tensor:  # fmt: skip
    """As `indexer_select`, of E4M3 codes `q [T, h, c]` and `keys [N, c]` with a float32 scale for each row, `q_scales
    [T, h]` and `key_scales [N]`, as `undertow.quant.scheme.ACTIVATIONS` makes them of rows of 128 numbers."""
    return _select(q, keys, weights.float() * q_scales, key_scales, k, segments, ratio)


def _select(
    q: Tensor, keys: Tensor, weights: Tensor, key_scales: Tensor | None, k: int, segments: Segments, ratio: int
) -> Tensor:
    out = torch.empty((segments.tokens, k), dtype=torch.int64, device=q.device)
    q, keys, weights = aligned(q), aligned(keys), weights.contiguous()
    planned, view = runs(segments, ratio), sight(segments, ratio)
    # One allocation serves all runs: what the last one left is never read.
    room = torch.empty(max((r.tokens * r.width for r in planned), default=0), dtype=torch.float32, device=q.device)
    for run in planned:
        scores = room[: run.tokens * run.width].view(run.tokens, run.width)
        scores_of(q, keys, weights, segments, ratio, run, scores, key_scales)
        choose_best(scores, view.low, view.high, run.start, out)
    return out
