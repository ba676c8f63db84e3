"""Indexer distillation in Triton: run after run, the attention's mass beside the scores, reduced to a loss a query.

The definition is `undertow.ops.reference.distillation`. Forward keeps two numbers a query, backward makes both matrices
of a run again.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.reference.distillation import EPS
from undertow.ops.segments import Rows, Segments, end_to_end
from undertow.ops.triton.attention.descriptors import aligned
from undertow.ops.triton.attention.geometry import sight
from undertow.ops.triton.attention.sparse import HEADS
from undertow.ops.triton.indexer.divergence import COLUMNS, indexer_divergence, indexer_slopes
from undertow.ops.triton.indexer.gathered import measure_chosen, pays, rows_of
from undertow.ops.triton.indexer.gradients import Gradients
from undertow.ops.triton.indexer.mass import mass_of
from undertow.ops.triton.indexer.runs import SCORES, Run, equal_runs, runs
from undertow.ops.triton.indexer.scoring import scores_of
from undertow.ops.triton.indexer.select import refusal as refusal_of_scores
from undertow.ops.triton.indexer.select import type_of


def refusal(
    q: Tensor, keys: Rows, weights: Tensor, attention_q: Tensor, entries: Rows, lse: Tensor, segments: Segments, *,
    invariant: bool = False,
) -> str | None:  # fmt: skip
    """Why the kernels cannot serve a call with these operands, or None if they can."""
    heads, width = attention_q.shape[1:]
    if attention_q.dtype != torch.bfloat16 or entries.data.dtype != torch.bfloat16:
        return (
            f"attention's queries are {type_of(attention_q)} and entries {type_of(entries.data)}; both must be bfloat16"
        )
    if lse.dtype != torch.float32:
        return f"the log-sum-exp is {type_of(lse)}, not float32"
    if heads not in HEADS:
        return f"{heads} attention heads, not one of {', '.join(map(str, HEADS))}"
    if width % 16:
        return f"attention heads of {width} numbers, not a multiple of 16"
    reason = refusal_of_scores(q, keys, weights, segments, invariant=invariant)
    if reason is None and not end_to_end(entries):
        return "the kernels take the rows of this call end to end, not from a pool"
    return reason


class _Problem(NamedTuple):
    """Everything about one call that is not differentiated."""

    attention_q: Tensor
    entries: Tensor
    lse: Tensor
    selected: Tensor | None
    segments: Segments
    ratio: int
    scale: float

    def parts(self, q: Tensor, keys: Tensor, weights: Tensor) -> Iterator[_Part]:
        """Scores and mass of every token, run after run."""
        operands = q, keys, weights
        picked = None
        # Two matrices of this size exist at once.
        planned = runs(self.segments, self.ratio, SCORES // 2)
        if pays(self.selected, self.segments, self.ratio):
            picked = rows_of(self.selected, self.segments, self.ratio)
            planned = equal_runs(self.segments.tokens, picked[0].shape[1], SCORES // 2)
        most = max((r.tokens * r.width for r in planned), default=0)
        room = torch.empty((2, most), dtype=torch.float32, device=q.device)
        view = sight(self.segments, self.ratio)
        taught = self.attention_q, self.entries, self.lse
        for run in planned:
            scores, mass = room[:, : run.tokens * run.width].unflatten(1, (run.tokens, run.width))
            if picked is not None:
                measure_chosen(*operands, *taught, picked, self.scale, run, scores, mass)
                yield _Part(run, scores, mass, torch.zeros_like(picked[1]), picked[1], None, picked)
                continue
            scores_of(*operands, self.segments, self.ratio, run, scores)
            mass_of(*taught, self.segments, self.ratio, self.scale, run, mass)
            yield _Part(run, scores, mass, view.low, view.high, _chosen(self.selected, run), None)


class _Part(NamedTuple):
    """A run's scores and mass, the bounds whose difference is what counts of a row, which columns of it are selected
    (None: all), and the entries that the columns stand for, if they do not follow each other."""

    run: Run
    scores: Tensor
    mass: Tensor
    low: Tensor
    high: Tensor
    chosen: Tensor | None
    picked: tuple[Tensor, Tensor] | None


def _chosen(selected: Tensor | None, run: Run) -> Tensor | None:
    """The selection of a run as a table of int8 `[tokens, width + 1]`."""
    if selected is None:
        return None
    picks = selected[run.start : run.stop]
    table = torch.zeros((run.tokens, run.width + 1), dtype=torch.int8, device=picks.device)
    inside = (picks >= 0) & (picks < run.width)
    return table.scatter_(1, torch.where(inside, picks, run.width), 1)


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, keys: Tensor, weights: Tensor, p: _Problem) -> Tensor:
        loss, total, normaliser = torch.empty((3, len(q)), dtype=torch.float32, device=q.device)
        for run, scores, mass, low, high, chosen, _ in p.parts(q, keys, weights):
            indexer_divergence[(run.tokens,)](
                scores, mass, chosen, low, high, loss, total, normaliser, run.start, run.width,
                EPS=EPS, CHOSEN=chosen is not None, COLUMNS=COLUMNS, num_warps=4,
            )  # fmt: skip
        ctx.save_for_backward(q, keys, weights, total, normaliser)
        ctx.problem = p
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        q, keys, weights, total, normaliser = ctx.saved_tensors
        p: _Problem = ctx.problem
        # d KL / d score = t sum - t: `pull` times the indexer's softmax, less `push` times the attention's mass.
        push = grad / total.clamp(min=EPS)
        pull = push * total
        gradients = Gradients(q, keys, weights, p.segments, p.ratio)
        for run, scores, mass, low, high, chosen, picked in p.parts(q, keys, weights):
            indexer_slopes[run.tokens, triton.cdiv(run.width, COLUMNS)](
                scores, mass, chosen, low, high, pull, push, normaliser, run.start, run.width,
                CHOSEN=chosen is not None, COLUMNS=COLUMNS, num_warps=4,
            )  # fmt: skip
            if picked is None:
                gradients.add(run, scores)
            else:
                gradients.add_chosen(run, scores, picked)
        return *gradients.result(), None


def indexer_distillation(
    q: Tensor, keys: Rows, weights: Tensor, attention_q: Tensor, entries: Rows, lse: Tensor, selected: Tensor | None,
    segments: Segments, *, ratio: int, scale: float, invariant: bool = False,
) -> Tensor:  # fmt: skip
    """`KL(target || softmax of the indexer's scores)` of each query in nats, `[T]` float32; 0 where it sees no entry.

    Operands as in the reference, of the types and sizes that `refusal` allows; `q`, `keys` and `weights` get gradients,
    summed in float32. A selection restricts both sides of the divergence; an entry counts once. Where tokens see
    far more than they select, only what is selected is computed, and the gradient of keys is summed in an order that
    varies, unless torch is told to be deterministic.
    """
    taught = aligned(attention_q.detach()), aligned(entries.data.detach()), lse.detach().contiguous()
    problem = _Problem(*taught, selected, segments, ratio, scale)
    return _Distillation.apply(aligned(q), aligned(keys.data), weights.contiguous(), problem)
