"""Sparse attention by kernels, differentiable: the operator of `undertow.ops.reference.attention` in training calls."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.ops.segments import Rows, Segments, end_to_end
from undertow.ops.triton.attention.backward import backward
from undertow.ops.triton.attention.descriptors import aligned
from undertow.ops.triton.attention.forward import forward
from undertow.ops.triton.attention.geometry import LARGEST_WINDOW, Slab, slabs
from undertow.ops.triton.attention.selection import Chosen

HEADS = (8, 16, 32, 64, 128)
"""Heads of which whole tokens fill the rows of a program."""
_NUMBERS = 1 << 31
"""Numbers of all entries from which on an int32 does not tell their places."""


def refusal(
    q: Tensor,
    window: Rows,
    entries: Rows | None,
    segments: Segments,
    *,
    window_size: int,
    invariant: bool = False,
) -> str | None:
    """Why the kernels do not serve such a call of `sparse_attention`, or None if they do."""
    heads, width = q.shape[1:]
    given = (window,) if entries is None else (window, entries)
    for x in (q, *(rows.data for rows in given)):
        if x.dtype != torch.bfloat16:
            return f"the kernels compute in bfloat16, not {str(x.dtype).removeprefix('torch.')}"
    if heads not in HEADS:
        return f"the kernels take 8, 16, 32, 64 or 128 heads, not {heads}"
    if width % 64:
        return f"the kernels take heads whose width is a multiple of 64, not {width}"
    if not 1 <= window_size <= LARGEST_WINDOW:
        return f"the kernels take windows of 1 to {LARGEST_WINDOW} tokens, not {window_size}"
    if any(segments.past):
        return "the kernels take documents from their first token on, and one of these continues"
    if not all(end_to_end(rows) for rows in given):
        return "the kernels take the rows of this call end to end, not from a pool"
    if entries is not None and entries.data.numel() >= _NUMBERS:
        return f"the kernels take entries of less than 2^31 numbers in all, not {entries.data.numel():,}"
    if invariant:
        return "the kernels' results depend on the other documents of a call, and batch_invariant is on"
    return None


class _Problem(NamedTuple):
    """What is not differentiated."""

    segments: Segments
    selected: Tensor | None
    window_size: int
    ratio: int
    scale: float


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, window: Tensor, entries: Tensor | None, sink: Tensor, p: _Problem):
        o, lse, chosen = forward(
            q, window, entries, p.selected, sink, p.segments, window_size=p.window_size, ratio=p.ratio, scale=p.scale
        )
        ctx.keep = None if p.selected is None else p.selected.shape[1]
        ctx.problem = p._replace(selected=None)
        ctx.forms = [slab.form for slab in _slabs(q, entries, ctx.keep, p)]
        # Slabs in the near form do not read it.
        near = all(form == "near" for form in ctx.forms)
        kept = [x for pick in chosen for x in (pick if isinstance(pick, tuple) else (pick,))]
        ctx.save_for_backward(q, window, entries, sink, None if near else o, lse, *kept)
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _: Tensor):  # type: ignore[override]
        q, window, entries, sink, o, lse, *kept = ctx.saved_tensors
        saved = iter(kept)
        chosen: tuple[Chosen, ...] = tuple(
            (next(saved), next(saved)) if form == "gather" else next(saved) for form in ctx.forms
        )
        p: _Problem = ctx.problem
        grads = backward(
            q, window, entries, sink, o, lse, aligned(grad), chosen, p.segments,
            window_size=p.window_size, ratio=p.ratio, scale=p.scale, keep=ctx.keep,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return *grads, None


def _slabs(q: Tensor, entries: Tensor | None, keep: int | None, p: _Problem) -> tuple[Slab, ...]:
    if entries is None or len(entries) == 0:
        return slabs(p.segments, 0, q.shape[1], None)
    return slabs(p.segments, p.ratio, q.shape[1], keep)


def sparse_attention(
    q: Tensor,
    window: Rows,
    entries: Rows | None,
    selected: Tensor | None,
    sink: Tensor,
    segments: Segments,
    *,
    window_size: int,
    ratio: int = 0,
    scale: float,
    invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of every query to its window, its document's visible entries and a sink; value = key.

    Parameters and results as `undertow.ops.reference.attention.sparse_attention`, in bfloat16 with float32 sums, for
    calls that `refusal` does not name. Results have the same bits whenever the same call is made; so have gradients,
    but those of entries in long documents with a selection only under `torch.use_deterministic_algorithms`.
    """
    del invariant  # refused
    problem = _Problem(segments, selected, window_size, ratio, scale)
    rows = None if entries is None else aligned(entries.data)
    return _SparseAttention.apply(aligned(q), aligned(window.data), rows, sink.float(), problem)
