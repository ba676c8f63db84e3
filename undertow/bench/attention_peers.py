"""Sparse attention as others compute it: a gather and products under torch.compile, and flex_attention.

Each function takes a `Problem` and gives what makes a function from its leaves to the output `[T, H, D]`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from undertow.bench.task import PEER, Absent

if TYPE_CHECKING:
    from undertow.bench.attention import Problem

LIMIT = PEER

_Make = Callable[[], Callable[[Sequence[Tensor]], Tensor]]


def compiled(problem: Problem) -> _Make:
    """The rows that each query sees gathered into `[T, K, D]`, two products and a softmax, under torch.compile."""

    def make() -> Callable[[Sequence[Tensor]], Tensor]:
        index = _seen_rows(problem)
        keep_graphs()

        def gathered(q: Tensor, keys: Tensor, sink: Tensor) -> Tensor:
            rows = keys[index.clamp(min=0)]
            score = (q @ rows.mT).float() * problem.scale
            score = score.masked_fill((index < 0)[:, None], -torch.inf)
            beside = sink[None, :, None].expand(len(q), -1, 1)
            share = torch.cat([score, beside], -1).softmax(-1)[..., :-1]
            return share.to(q.dtype) @ rows

        function = torch.compile(gathered, dynamic=False)

        def call(leaves: Sequence[Tensor]) -> Tensor:
            q, *latents, sink = leaves
            return function(q, torch.cat(latents), sink)

        return call

    return make


def flex(problem: Problem) -> _Make:
    """flex_attention over all rows with a block mask; the sink enters by the log-sum-exp afterwards."""

    def make() -> Callable[[Sequence[Tensor]], Tensor]:
        if problem.device.type == "cpu":
            raise Absent("flex_attention has no backward pass on a CPU")
        if problem.selected is not None:
            raise Absent("a block mask cannot skip single entries: flex_attention would multiply every one")
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        tokens, visible = len(problem.q), _visible(problem)

        def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return visible(query, key)

        keys = tokens + (0 if problem.entries is None else len(problem.entries))
        blocks = create_block_mask(mask, None, None, tokens, keys, device=str(problem.device))
        keep_graphs()

        def attend(q: Tensor, rows: Tensor, sink: Tensor) -> Tensor:
            heads = q.transpose(0, 1)[None]
            rows = rows[None, None]
            o, lse = flex_attention(
                heads, rows, rows, block_mask=blocks, scale=problem.scale, enable_gqa=True, return_lse=True
            )
            share = torch.sigmoid(lse - sink[None, :, None])
            return (o * share[..., None]).to(q.dtype)[0].transpose(0, 1)

        function = torch.compile(attend, dynamic=False)

        def call(leaves: Sequence[Tensor]) -> Tensor:
            q, *latents, sink = leaves
            return function(q, torch.cat(latents), sink)

        return call

    return make


def tilelang(problem: Problem) -> _Make:
    """Says what the package lacks."""

    def make() -> Any:
        if importlib.util.find_spec("tilelang") is None:
            raise Absent("tilelang is not installed")
        raise Absent("the tilelang package ships no kernel of this operator, only examples")

    return make


def keep_graphs() -> None:
    """Let a compiled backward pass be taken more than once from one forward pass."""
    from torch._functorch import config

    config.donated_buffer = False


def _visible(problem: Problem) -> Callable[[Tensor, Tensor], Tensor]:
    """Whether a query sees a row of window and entries end to end."""
    segments, form, tokens = problem.segments, problem.form, len(problem.q)
    begin = torch.arange(tokens, device=problem.device) - segments.positions
    made = [length // form.ratio if form.ratio else 0 for length in problem.lengths]
    first = torch.tensor([0, *made], device=problem.device).cumsum(0)[:-1]
    low = first[segments.document]
    high = low + (segments.positions + 1) // form.ratio if form.ratio else low

    def visible(query: Tensor, key: Tensor) -> Tensor:
        near = (key <= query) & (query - key < form.window) & (key >= begin[query])
        entry = key - tokens
        return torch.where(key < tokens, near, (entry >= low[query]) & (entry < high[query]))

    return visible


def _seen_rows(problem: Problem) -> Tensor:
    """Rows of window and entries end to end that each query sees, `[T, K]`, -1 where there is none."""
    segments, form, tokens = problem.segments, problem.form, len(problem.q)
    row = torch.arange(tokens, device=problem.device)[:, None]
    back = torch.arange(form.window, device=problem.device)
    parts = [torch.where(back <= segments.positions[:, None], row - back, -1)]
    if form.ratio:
        made = [length // form.ratio for length in problem.lengths]
        first = tokens + torch.tensor([0, *made], device=problem.device).cumsum(0)[:-1][segments.document][:, None]
        entry = problem.selected
        if entry is None:
            entry = torch.arange(max(made), device=problem.device).expand(tokens, -1)
            entry = entry.masked_fill(entry >= ((segments.positions + 1) // form.ratio)[:, None], -1)
        parts.append(torch.where(entry >= 0, first + entry, -1))
    return torch.cat(parts, 1)
