"""Forward of sparse attention, slab by slab, each in its form."""

# pyright: basic, reportArgumentType=false
# Sizes that a kernel is compiled for are of a type of their own.
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
from torch import Tensor

from undertow.ops.segments import Segments
from undertow.ops.triton.attention.descriptors import described
from undertow.ops.triton.attention.geometry import BLOCK, NEAR, Sight, Slab, old_rows, sight, slabs
from undertow.ops.triton.attention.pool_forward import (
    dense_probabilities,
    gather_probabilities,
    mix_values,
    settle_shifts,
    window_probabilities,
)
from undertow.ops.triton.attention.selection import Chosen, chosen
from undertow.ops.triton.attention.tiles import ROWS, dividing, tiles
from undertow.ops.triton.attention.window_forward import window_forward


@dataclass(frozen=True)
class _Call:
    """q and o `[T, H, D]`, lse `[T, H]`, window `[T, D]`, entries `[N, D]` or None if there are none."""

    q: Tensor
    window: Tensor
    entries: Tensor | None
    sink: Tensor
    o: Tensor
    lse: Tensor
    view: Sight
    window_size: int
    scale: float

    @cached_property
    def shape(self) -> dict[str, int]:
        """Sizes that every kernel over the window takes."""
        return {"H": self.q.shape[1], "D": self.q.shape[2], "OLD": old_rows(self.window_size), "NEW": BLOCK}

    @cached_property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.view.begin, self.view.low, self.view.high

    def tiles(self, kernel: str) -> dict[str, int]:
        """The configuration of a kernel, with tiles that divide a head."""
        width, tile = self.q.shape[2], tiles(self.q.device, kernel)
        return {name: dividing(size, width) if name in ("BD", "BN") else size for name, size in tile.items()}


@dataclass(frozen=True)
class _Spill:
    """What the passes over a slab with entries hand on, rows being tokens times heads.

    P of the old and the new rows of the window and of the entries; for the window and each tile of entries the sums of
    rows and the powers of two that they are against.
    """

    old: Tensor
    new: Tensor
    pool: Tensor
    totals: Tensor
    shifts: Tensor


class _Memory:
    """Buffers for the largest slab of a call, which its slabs use one after the other."""

    def __init__(self, call: _Call, slabs: list[tuple[Slab, int]]):
        """`slabs` come with the columns that they keep."""
        self._heads, self._old_rows = call.q.shape[1], call.shape["OLD"]
        rows = max(slab.tokens for slab, _ in slabs) * self._heads
        pool = max(slab.tokens * columns for slab, columns in slabs) * self._heads
        device = call.q.device
        self._old, self._new, self._pool = (
            torch.empty(size, dtype=torch.bfloat16, device=device)
            for size in (rows * self._old_rows, rows * BLOCK, pool)
        )
        # A tile of entries has 32 columns or more.
        self._totals, self._shifts = (
            torch.empty(rows + pool // 32, dtype=torch.float32, device=device) for _ in range(2)
        )

    def of(self, slab: Slab, columns: int) -> _Spill:
        rows = slab.tokens * self._heads

        def part(x: Tensor, across: int) -> Tensor:
            return x[: rows * across].view(rows, across)

        old, new = part(self._old, self._old_rows), part(self._new, BLOCK)
        return _Spill(old, new, part(self._pool, columns) if columns else new, self._totals, self._shifts)


def _near(call: _Call, slab: Slab) -> None:
    """All of a slab's attention in one launch."""
    entries, shape, here = call.entries, call.shape, slice(slab.start, slab.stop)
    tile = call.tiles("window" if entries is None else "window with entries")
    tokens, old, wide, deep = ROWS // shape["H"], shape["OLD"], tile["BD"], tile["BN"]
    # Stands in for entries too where there are none, and is not read then.
    new = described(call.window, BLOCK, wide)
    window_forward[(triton.cdiv(slab.tokens, tokens),)](
        described(call.q[here].flatten(0, 1), ROWS, wide),
        described(call.window, old, wide), new, new if entries is None else described(entries, NEAR, wide),
        described(call.window, old, deep), described(call.window, BLOCK, deep),
        new if entries is None else described(entries, NEAR, deep),
        described(call.o[here].flatten(0, 1), ROWS, deep),
        call.lse[here], call.sink, *call.tables, slab.start, slab.tokens, call.scale,
        **shape, NEAR=0 if entries is None else NEAR, WINDOW=call.window_size, TOKENS=tokens, **tile,
    )  # fmt: skip


def _dense(call: _Call, slab: Slab, bits: Tensor | None, spill: _Spill) -> None:
    """All columns of a slab, masked by `bits` or by what its tokens see."""
    tile, shape, q = call.tiles("pool"), call.shape, call.q[slab.start : slab.stop].flatten(0, 1)
    tokens, old, step, wide = ROWS // shape["H"], shape["OLD"], tile["BK"], tile["BD"]
    # Without entries there is no column, and they are not read.
    keys = call.window if call.entries is None else call.entries
    dense_probabilities[(1 + slab.columns // step, triton.cdiv(slab.tokens, tokens))](
        described(q, ROWS, wide), described(call.window, old, wide), described(call.window, BLOCK, wide),
        described(keys, step, wide), call.view.low if bits is None else bits,
        described(spill.old, ROWS, old), described(spill.new, ROWS, BLOCK),
        described(spill.pool, ROWS, step if slab.columns else BLOCK), spill.shifts, spill.totals,
        call.sink, *call.tables, slab.start, slab.tokens, slab.column, slab.columns, call.scale,
        **shape, WINDOW=call.window_size, TOKENS=tokens, BITS=bits is not None, **tile,
    )  # fmt: skip
    _mix(call, slab, None, slab.columns, spill, step)


def _gather(call: _Call, slab: Slab, chosen: tuple[Tensor, Tensor], spill: _Spill) -> None:
    """The rows that each token of a slab chose."""
    shape, q, (rows, counts) = call.shape, call.q[slab.start : slab.stop].flatten(0, 1), chosen
    heads, old, columns = shape["H"], shape["OLD"], rows.shape[1]
    tile = call.tiles("window kept" if heads == ROWS else "window kept, one token")
    wide = tile["BD"]
    window_probabilities[(slab.tokens,)](
        described(q, heads, wide), described(call.window, old, wide), described(call.window, BLOCK, wide),
        described(spill.old, heads, old), described(spill.new, heads, BLOCK), spill.shifts, spill.totals,
        call.sink, call.view.begin, slab.start, slab.tokens, call.scale,
        **shape, WINDOW=call.window_size, TOKENS=1, **tile,
    )  # fmt: skip
    tile = call.tiles(_gathering("pool", heads))
    gather_probabilities[(columns // tile["BK"], slab.tokens)](
        described(q, heads, tile["BD"]), call.entries, rows, counts, described(spill.pool, heads, tile["BK"]),
        spill.shifts, spill.totals, slab.tokens, columns, call.scale, H=heads, D=shape["D"], **tile,
    )  # fmt: skip
    _mix(call, slab, chosen, columns, spill, tile["BK"])


def _gathering(kernel: str, heads: int) -> str:
    return f"{kernel}, gather, 128 heads" if heads == ROWS else f"{kernel}, gather"


def _mix(
    call: _Call, slab: Slab, chosen: tuple[Tensor, Tensor] | None, columns: int, spill: _Spill, written: int
) -> None:
    """o and lse of a slab from its P; a tile of entries is `written` columns, `chosen` those of the gather form."""
    shape, gather = call.shape, chosen is not None
    tokens = 1 if gather else ROWS // shape["H"]
    rows, programs = tokens * shape["H"], triton.cdiv(slab.tokens, tokens)
    _, low, high = call.tables
    # Read in the gather form alone.
    picked, counts = chosen if chosen is not None else (low, low)
    bounds = low, high, slab.start, slab.tokens, 0 if gather else slab.column, columns
    if columns:
        settle_shifts[(programs,)](
            described(spill.old, rows, BLOCK), described(spill.new, rows, BLOCK), described(spill.pool, rows, BLOCK),
            spill.shifts, spill.totals, counts, *bounds,
            H=shape["H"], OLD=shape["OLD"], NEW=BLOCK, TOKENS=tokens, GATHER=gather, TILE=written,
            **call.tiles("settle"),
        )  # fmt: skip
    tile = call.tiles(_gathering("mix", shape["H"]) if gather else "mix")
    step, deep = tile["BK"], tile["BN"]
    before = min(step, shape["OLD"])
    entries = call.window if call.entries is None else call.entries
    mix_values[(shape["D"] // deep, programs)](
        described(spill.old, rows, before), described(spill.new, rows, BLOCK),
        described(spill.pool, rows, step if columns else BLOCK),
        described(call.window, before, deep), described(call.window, BLOCK, deep), described(entries, step, deep),
        entries, picked, counts, described(call.o[slab.start : slab.stop].flatten(0, 1), rows, deep),
        call.lse[slab.start : slab.stop], spill.shifts, spill.totals, *bounds,
        **shape, TOKENS=tokens, GATHER=gather, BO=before, TILE=written, **tile,
    )  # fmt: skip


def forward(
    q: Tensor,
    window: Tensor,
    entries: Tensor | None,
    selected: Tensor | None,
    sink: Tensor,
    segments: Segments,
    *,
    window_size: int,
    ratio: int,
    scale: float,
) -> tuple[Tensor, Tensor, tuple[Chosen, ...]]:
    """Attention of a call without a past, all in bfloat16 but `sink [H]` in float32.

    `q [T, H, D]` contiguous, `window [T, D]`, `entries [N, D]` one per `ratio` tokens of a document, or None,
    `selected [T, K]` int64 or None, as `undertow.ops.reference.attention`. H is a power of two from 8 to 128, D a
    multiple of 64, `window_size` at most `LARGEST_WINDOW`, `scale` positive.
    Returns `o [T, H, D]`, the log-sum-exp with the sink `[T, H]` float32, and what the tokens of each slab chose.
    """
    if entries is None or not len(entries):
        entries, selected, ratio = None, None, 0
    tokens, heads, _ = q.shape
    o = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    call = _Call(q, window, entries, sink, o, lse, sight(segments, ratio), window_size, scale)
    planned = slabs(segments, ratio, heads, None if selected is None else selected.shape[1])
    picks = tuple(chosen(selected, call.view, slab) for slab in planned)
    kept = [p[0].shape[1] if isinstance(p, tuple) else slab.columns for p, slab in zip(picks, planned, strict=True)]
    spilled = [(slab, columns) for slab, columns in zip(planned, kept, strict=True) if slab.form != "near"]
    memory = _Memory(call, spilled) if spilled else None
    for slab, columns, pick in zip(planned, kept, picks, strict=True):
        if memory is None or slab.form == "near":
            _near(call, slab)
        elif isinstance(pick, tuple):
            _gather(call, slab, pick, memory.of(slab, columns))
        else:
            _dense(call, slab, pick, memory.of(slab, columns))
    return o, lse, picks
