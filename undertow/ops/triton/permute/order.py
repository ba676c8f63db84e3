"""The order of choices by expert, and by token within one, in two kernels without sorting.

Each program of the first counts the experts of its span of choices. Each of the second sums those counts, of all spans
and of those before its own, which says where its choices begin among those of each expert, and ranks its own by
comparing them.

Both are so short that it counts how long one takes to start after another: a chip that can starts them EARLY, while the
kernel before each still runs, and they wait for its end.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# The language of kernels has types of its own.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from undertow.ops.reference.experts import Dispatch
from undertow.ops.triton.permute.tiles import Tiles, tiles

EXPERTS = 1024
_COUNTS = 8192
"""Most counts that a program holds of each kind: of more experts it takes those of fewer programs at a time."""
BINS = 64
"""Experts that are counted at least: one for each lane of the widest warp."""


def refusal(indices: Tensor, experts: int) -> str | None:
    """Why the kernels cannot serve a call with these operands, or None if they can."""
    if experts > EXPERTS:
        return f"{experts} experts, more than {EXPERTS}"
    if indices.numel() >= 1 << 30:
        return f"{indices.numel()} choices, {1 << 30} or more"
    if indices.dtype not in (torch.int32, torch.int64):
        return f"choices are {str(indices.dtype).removeprefix('torch.')}, neither int32 nor int64"
    return None


@triton.jit
def count_choices(indices, parts, choices, span, BINS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """How often each expert stands in one span of `choices`: a row of `parts [spans, BINS]`."""
    first = tl.program_id(0) * span
    end = tl.minimum(first + span, choices)
    count = tl.zeros((BINS,), tl.int32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        # Not before: what this waits for would not be through for the kernel that is launched.
        tl.extra.cuda.gdc_launch_dependents()
    for start in tl.range(first, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        expert = tl.load(indices + n, n < end, other=0).to(tl.int32)
        count += tl.histogram(expert, BINS, mask=n < end)
    tl.store(parts + tl.program_id(0) * BINS + tl.arange(0, BINS), count)


@triton.jit
def _beginnings(
    parts, counts, p, spans, E: tl.constexpr, BINS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr
):
    """Slot of the first choice of each expert in span p; the first program writes `counts [E]`."""
    bins = tl.arange(0, BINS)
    every = tl.zeros((PARTS, BINS), tl.int32)
    before = tl.zeros((PARTS, BINS), tl.int32)
    for start in tl.range(0, spans, PARTS, num_stages=STAGES):
        part = start + tl.arange(0, PARTS)
        count = tl.load(parts + part[:, None] * BINS + bins[None, :], (part < spans)[:, None], other=0)
        every += count
        before += tl.where((part < p)[:, None], count, 0)
    load = tl.sum(every, 0)
    if p == 0:
        tl.store(counts + bins, load, bins < E)
    return tl.cumsum(load, 0) - load + tl.sum(before, 0)


@triton.jit(do_not_specialize=["spans"])
def place_choices(
    indices, parts, choice, slot, counts, choices, span, spans,
    E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One span: the slot of each choice, and the choice in each slot; the first program writes `counts [E]`."""
    p = tl.program_id(0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    next_ = _beginnings(parts, counts, p, spans, E, BINS, PARTS, STAGES)
    first = p * span
    m = tl.arange(0, BLOCK)
    for start in tl.range(first, tl.minimum(first + span, choices), BLOCK):
        n = start + m
        inside = n < choices
        expert = tl.load(indices + n, inside, other=0).to(tl.int32)
        # Of the numbers expert BLOCK + place, only those of earlier choices of the same expert are less by 1 to m.
        last = expert * BLOCK + m - 1
        rank = tl.zeros((BLOCK,), tl.int32)
        for j in tl.static_range(0, BLOCK, OTHERS):
            o = j + tl.arange(0, OTHERS)
            other = tl.load(indices + start + o, start + o < choices, other=E).to(tl.int32) * BLOCK + o
            less = (last[None, :] - other[:, None]).to(tl.uint32, bitcast=True)
            rank += tl.sum((less < m[None, :].to(tl.uint32)).to(tl.int32), 0)
        place = tl.gather(next_, expert, 0) + rank
        tl.store(slot + n, place, inside)
        tl.store(choice + place, n, inside)
        next_ += tl.histogram(expert, BINS, mask=inside)


def _launched(tile: Tiles) -> dict[str, int | bool]:
    """What a launch takes by name."""
    early = {"launch_pdl": True} if tile["EARLY"] else {}
    return {**{name: value for name, value in tile.items() if name != "SPANS"}, **early}


@torch.no_grad()
def dispatch_order(indices: Tensor, experts: int) -> Dispatch:
    """Slots sorted by expert, by token within an expert, for choices `indices [T, k]` of whole numbers below `experts`;
    what is made is int32. No host waits for it."""
    choices, device = indices.numel(), indices.device
    choice, slot = (torch.empty(choices, dtype=torch.int32, device=device) for _ in range(2))
    if choices == 0:
        return Dispatch(choice, slot, torch.zeros(experts, dtype=torch.int32, device=device), indices.shape[1])
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    indices = indices.contiguous()
    tile, bins = tiles(device, "place"), max(triton.next_power_of_2(experts), BINS)
    span = triton.cdiv(triton.cdiv(choices, tile["SPANS"]), tile["BLOCK"]) * tile["BLOCK"]
    spans = triton.cdiv(choices, span)
    parts = torch.empty((spans, bins), dtype=torch.int32, device=device)
    tile = {**tile, "PARTS": max(min(tile["PARTS"], _COUNTS // bins), 1)}
    count_choices[(spans,)](indices, parts, choices, span, BINS=bins, **_launched(tiles(device, "count")))
    place_choices[(spans,)](
        indices, parts, choice, slot, counts, choices, span, spans, E=experts, BINS=bins, **_launched(tile)
    )
    return Dispatch(choice, slot, counts, indices.shape[1])
