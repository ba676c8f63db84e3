"""Gradients of the indexer's scores, from `slope [tokens, width]`: that of the loss by each score of a run.

`dq[t, j] = w[t, j] sum_n a k[n]`, `dk[n] = sum_tj w[t, j] a q[t, j]` with `a = slope[t, n]` where `q . k > 0` (else 0),
and `dw[t, j] = sum_n slope relu(q . k)`. Sums over tokens run in a fixed order, equal bits from equal calls, unless a
selection is followed.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
# The language of kernels has types of its own.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from undertow.ops.segments import Segments
from undertow.ops.triton.attention.geometry import sight
from undertow.ops.triton.indexer.gathered import gradients_of_chosen
from undertow.ops.triton.indexer.runs import Run
from undertow.ops.triton.indexer.scoring import matrix
from undertow.ops.triton.indexer.tiles import tiles

_PROGRAMS = 528
"""Programs that share the keys' gradient: four for each multiprocessor of an H200."""


@triton.jit
def indexer_of_queries(
    q, keys, weights, slope, low, high, dq, dw, start, width,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One token, the last first: its heads' dq and dw, over the entries it sees."""
    token = start + tl.num_programs(0) - 1 - tl.program_id(0)
    begin, end = tl.load(low + token), tl.load(high + token)
    head, c = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    a = q.load([token * HEADS, 0])
    slope += (token - start).to(tl.int64) * width
    sums = tl.zeros((HEADS, WIDTH), tl.float32)
    of_weight = tl.zeros((HEADS,), tl.float32)
    for n0 in tl.range(begin, end, ENTRIES, num_stages=STAGES):
        n = n0 + tl.arange(0, ENTRIES)
        g = tl.load(slope + (n - begin), n < end, other=0.0)[None, :]
        k = keys.load([n0, 0])
        dots = tl.dot(a, k.T)
        of_weight += tl.sum(tl.maximum(dots, 0.0) * g, 1)
        # Zero times a slope that is NaN is NaN.
        sums = tl.dot(tl.where(dots > 0.0, g, g * 0.0).to(tl.bfloat16), k, sums)
    weight = tl.load(weights + token * HEADS + head).to(tl.float32)
    place = (token * HEADS + head).to(tl.int64)
    tl.store(dq + place[:, None] * WIDTH + c[None, :], sums * weight[:, None])
    tl.store(dw + place, of_weight)


@triton.jit
def indexer_of_keys(
    q, keys, weights, slope, low, high, first_token, end_token, partial, start, stop, width, entries,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (i, j) adds to `partial[j]` what the tokens j, j + num_programs(1), ... give to the i-th ENTRIES.

    `first_token`, `end_token`: the tokens that see some of these entries.
    """
    n0 = tl.program_id(0) * ENTRIES
    share, shares = tl.program_id(1), tl.num_programs(1)
    first = tl.maximum(tl.load(first_token + tl.program_id(0)), start)
    last = tl.minimum(tl.load(end_token + tl.program_id(0)), stop)
    if first + share < last:
        k = keys.load([n0, 0])
        n, c, head = n0 + tl.arange(0, ENTRIES), tl.arange(0, WIDTH), tl.arange(0, HEADS)
        sums = tl.zeros((ENTRIES, WIDTH), tl.float32)
        for t in tl.range(first + share, last, shares, num_stages=STAGES):
            begin, end = tl.load(low + t), tl.load(high + t)
            row = slope + tl.cast(t - start, tl.int64) * width
            g = tl.load(row + (n - begin), (n >= begin) & (n < end), other=0.0)
            weight = tl.load(weights + t * HEADS + head).to(tl.float32)
            a = q.load([t * HEADS, 0])
            dots = tl.dot(k, a.T)
            each = tl.where(dots > 0.0, g[:, None] * weight[None, :], g[:, None] * 0.0)
            sums = tl.dot(each.to(tl.bfloat16), a, sums)
        place = partial + (share.to(tl.int64) * entries + n)[:, None] * WIDTH + c[None, :]
        held = (n < entries)[:, None]
        tl.store(place, tl.load(place, held) + sums, held)


def _seen_by(segments: Segments, ratio: int, block: int) -> Tensor:
    """First token that sees some of each `block` entries, and the first after the last that does, int32 `[2, .]`."""

    def make() -> Tensor:
        view = sight(segments, ratio)
        low, high = view.seen.contiguous()
        n = torch.arange(0, view.entries, block)
        first = torch.searchsorted(high, n, right=True)
        end = torch.searchsorted(low, n + block)
        return torch.stack((first, end)).to(torch.int32).to(segments.device, non_blocking=True)

    return segments.once(("indexer seen by", ratio, block), make)


class Gradients:
    """The three gradients of a call in float32, to which `add` brings one run after the other."""

    def __init__(self, q: Tensor, keys: Tensor, weights: Tensor, segments: Segments, ratio: int):
        self.inputs = q, keys, weights
        self.segments, self.ratio = segments, ratio
        self.block = tiles(q.device, "of keys")["ENTRIES"]
        self.blocks = triton.cdiv(len(keys), self.block)
        shares = max(min(_PROGRAMS // max(self.blocks, 1), triton.cdiv(len(q), 16)), 1)
        # Kernels write every row of these two, if there are kernels to run.
        made = torch.empty if len(keys) else torch.zeros
        self.of_q = made(q.shape, dtype=q.dtype, device=q.device)
        self.of_weights = made(weights.shape, dtype=torch.float32, device=q.device)
        self.partial = torch.zeros((shares, *keys.shape), dtype=torch.float32, device=q.device)

    def add(self, run: Run, slope: Tensor) -> None:
        """A run's tokens; `slope [run.tokens, run.width]` float32 is read only where a token sees an entry."""
        q, keys, weights = self.inputs
        if len(keys) == 0:
            return
        view, heads, width = sight(self.segments, self.ratio), q.shape[1], q.shape[2]
        tile = tiles(q.device, "of queries", heads)
        indexer_of_queries[(run.tokens,)](
            matrix(q, heads), matrix(keys, tile["ENTRIES"]), weights, slope, view.low, view.high, self.of_q,
            self.of_weights, run.start, run.width, HEADS=heads, WIDTH=width, **tile,
        )  # fmt: skip
        tile = tiles(q.device, "of keys", heads)
        seen_by = _seen_by(self.segments, self.ratio, self.block)
        indexer_of_keys[self.blocks, len(self.partial)](
            matrix(q, heads), matrix(keys, tile["ENTRIES"]), weights, slope, view.low, view.high, *seen_by,
            self.partial, run.start, run.stop, run.width, len(keys), HEADS=heads, WIDTH=width, **tile,
        )  # fmt: skip

    def add_chosen(self, run: Run, slope: Tensor, picked: tuple[Tensor, Tensor]) -> None:
        """A run's tokens, whose columns are the entries of `picked`; the order of sums over tokens varies."""
        gradients_of_chosen(*self.inputs, picked, run, slope, self.of_q, self.partial[0], self.of_weights)

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, keys and weights in their types."""
        _, keys, weights = self.inputs
        return self.of_q, self.partial.sum(0).to(keys.dtype), self.of_weights.to(weights.dtype)
