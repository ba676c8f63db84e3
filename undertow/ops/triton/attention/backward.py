"""Sparse attention backward: scores, then products, slab by slab; see `window_backward` for the form.

What a slab spills lies in buffers made for the largest slab of a call. Gradients of keys are float32 partial sums added
in a fixed order; only the gather form, unless asked to be deterministic, adds by atomics.
"""

# pyright: basic, reportArgumentType=false, reportCallIssue=false
# Launches: the language of kernels has types of its own.
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from undertow.ops.segments import Segments
from undertow.ops.triton.attention import gather_backward, pool_backward, rounding, sums, window_backward
from undertow.ops.triton.attention.descriptors import described
from undertow.ops.triton.attention.geometry import BLOCK, COLUMNS, NEAR, Sight, Slab, old_rows, sight, slabs
from undertow.ops.triton.attention.selection import Chosen
from undertow.ops.triton.attention.tiles import ROWS, dividing, tiles


@dataclass(frozen=True)
class _Call:
    """One call: operands and results in rows (token x head) of `width` numbers, and what its slabs share.

    One float32 a row are `sinks`, the row's share of the sink's gradient with its sign turned, and where slabs are not
    near, `delta` and what `rounding` reads: `sizes`, `ratios` and `rests`. `window_size` is in tokens.
    """

    q: Tensor
    do: Tensor
    o: Tensor | None
    window: Tensor
    entries: Tensor | None
    sink: Tensor
    lse: Tensor
    segments: Segments
    view: Sight
    ratio: int
    heads: int
    width: int
    window_size: int
    scale: float
    dq: Tensor
    dwindow: Tensor
    dentries: Tensor | None
    sinks: Tensor
    delta: Tensor
    sizes: Tensor
    ratios: Tensor
    rests: Tensor

    @property
    def old(self) -> int:
        """Rows of the window before a block."""
        return old_rows(self.window_size)

    def tiles(self, kernel: str) -> dict[str, int]:
        """Launch configuration, its widths dividing that of a head."""
        tile = tiles(self.q.device, kernel)
        return {name: dividing(size, self.width) if name in ("BD", "BN") else size for name, size in tile.items()}


@dataclass(frozen=True)
class _Spill:
    """Buffers for the largest slab: P and dS of the window (`old`, `new`) and of entries (`p`, `ds`), sums of dS over
    each tile of these, the excess of each row and the flag of each group of rows (see `rounding`), and parts of the
    gradients of window, entries and chosen entries.
    """

    old: tuple[Tensor, Tensor]
    new: tuple[Tensor, Tensor]
    p: Tensor
    ds: Tensor
    sums: Tensor
    excess: Tensor
    flags: Tensor
    window_parts: Tensor
    parts: Tensor
    chosen_parts: Tensor


def _matrix(flat: Tensor, rows: int, columns: int) -> Tensor:
    return flat[: rows * columns].view(rows, columns)


def backward(
    q: Tensor,
    window: Tensor,
    entries: Tensor | None,
    sink: Tensor,
    o: Tensor | None,
    lse: Tensor,
    do: Tensor,
    chosen: tuple[Chosen, ...],
    segments: Segments,
    *,
    window_size: int,
    ratio: int,
    scale: float,
    keep: int | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of `q [T, H, D]`, `window [T, D]`, `entries [N, D]` (bfloat16) and `sink [H]` from `do [T, H, D]`.

    `lse` and `chosen` are the forward's, `keep` is the number of entries that a query selected at most (None: all);
    `o` is read only by slabs that are not near. With `deterministic` the gather form sums in a fixed order too.
    """
    tokens, heads, width = q.shape
    held = entries if entries is not None and len(entries) else None
    if held is None:
        ratio, keep = 0, None
    view = sight(segments, ratio)
    planned = slabs(segments, ratio, heads, keep)
    # A slab adds to what the one before it has written of its window.
    kind = torch.float32 if len(planned) > 1 else torch.bfloat16
    unsettled = 0 if all(slab.form == "near" for slab in planned) else tokens * heads
    call = _Call(
        q.view(-1, width), do.view(-1, width), None if o is None else o.view(-1, width), window, held, sink, lse,
        segments, view, ratio, heads, width, window_size, scale,
        torch.empty(tokens * heads, width, dtype=torch.bfloat16, device=q.device),
        torch.empty(tokens, width, dtype=kind, device=q.device),
        None if held is None else torch.zeros(held.shape, dtype=torch.float32, device=q.device),
        *(torch.empty(rows, dtype=torch.float32, device=q.device) for rows in (tokens * heads, *4 * (unsettled,))),
    )  # fmt: skip
    spill = _spill(call, planned, chosen, deterministic)
    for slab, selection in zip(planned, chosen, strict=True):
        _window_scores(call, slab, spill)
        if slab.form == "near":
            _window_keys(call, slab, spill)
        elif slab.form == "dense":
            _dense(call, slab, spill, selection if isinstance(selection, Tensor) else None)
        else:
            assert isinstance(selection, tuple)
            _gather(call, slab, spill, *selection, deterministic)
    dentries = torch.zeros_like(entries) if call.dentries is None and entries is not None else call.dentries
    return (
        call.dq.view(q.shape),
        call.dwindow.to(window.dtype),
        None if dentries is None else dentries.to(torch.bfloat16),
        call.sinks.view(tokens, heads).sum(0).neg_().to(sink.dtype),
    )


def _rows(slab: Slab, heads: int) -> int:
    """Rows (token x head) of the slab's whole blocks."""
    return triton.cdiv(slab.tokens, BLOCK) * BLOCK * heads


def _spill(call: _Call, planned: tuple[Slab, ...], chosen: tuple[Chosen, ...], deterministic: bool) -> _Spill:
    rows = max((_rows(slab, call.heads) for slab in planned), default=0)
    blocks = rows // (BLOCK * call.heads)
    of_p, of_ds, parts, slots = 0, 0, 0, 0
    for slab, selection in zip(planned, chosen, strict=True):
        here = _rows(slab, call.heads)
        if isinstance(selection, tuple):
            of_ds = max(of_ds, here * selection[0].shape[1])
            slots = max(slots, selection[0].numel())
        elif slab.form == "dense" and slab.columns:
            pieces = pool_backward.plan(call.view, slab, call.segments, call.ratio, call.heads).pieces
            of_p, parts = max(of_p, here * slab.columns), max(parts, len(pieces) * COLUMNS)
        elif call.entries is not None:
            of_p, parts = max(of_p, here * NEAR), max(parts, blocks * NEAR)

    def narrow(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=call.q.device)

    def wide(count: int) -> Tensor:
        return torch.empty((count, call.width), dtype=torch.float32, device=call.q.device)

    return _Spill(
        (narrow(rows, call.old), narrow(rows, call.old)), (narrow(rows, BLOCK), narrow(rows, BLOCK)),
        narrow(of_p), narrow(max(of_ds, of_p)),
        # A tile of entries or slots has 32 at least.
        torch.empty(max(of_ds, of_p) // 32, dtype=torch.float32, device=call.q.device),
        torch.empty(rows, dtype=torch.float32, device=call.q.device),
        torch.empty(rows // ROWS, dtype=torch.int32, device=call.q.device),
        wide(blocks * (call.old + BLOCK)), wide(parts),
        narrow(slots if deterministic else 0, call.width),
    )  # fmt: skip


def _beside(call: _Call, slab: Slab, spill: _Spill) -> tuple[int, Tensor, Tensor, int]:
    """Entries in the tile of a near slab, their P and dS, and columns of these. Where there are none (0), what is there
    stands in for them, and is not read."""
    if slab.form != "near" or call.entries is None:
        return 0, *spill.new, BLOCK
    rows = _rows(slab, call.heads)
    return NEAR, _matrix(spill.p, rows, NEAR), _matrix(spill.ds, rows, NEAR), NEAR


def _window_scores(call: _Call, slab: Slab, spill: _Spill) -> None:
    """P and dS of the window; in the near form also of entries, and dq."""
    full, (near, p, ds, side) = slab.form == "near", _beside(call, slab, spill)
    rows, old, width = _rows(slab, call.heads), call.old, call.width
    t = call.tiles("window scores" + (" with entries" if near else "" if full else ", kept"))
    m, d, n = t["M"], t["BD"], t["BN"]
    keys = call.entries if near else call.window
    window_backward.window_scores[(rows // m,)](
        described(call.q, m, d), described(call.do, m, d), call.q if call.o is None else call.o, call.do, call.q,
        described(call.window, old, d), described(call.window, BLOCK, d), described(keys, side, d),
        described(call.window, old, n), described(call.window, BLOCK, n), described(keys, side, n),
        described(call.dq, m, n),
        *(described(x, m, old) for x in spill.old), *(described(x, m, BLOCK) for x in spill.new),
        described(p, m, side), described(ds, m, side),
        call.view.begin, call.view.low, call.view.high, call.lse, call.delta, call.sizes, call.ratios, call.sink,
        call.sinks if full else call.rests, slab.start, call.segments.tokens, call.scale,
        WINDOW=call.window_size, H=call.heads, D=width, OLD=old, NEW=BLOCK, NEAR=near,
        FULL=full, BX=dividing(128, width), **t,
    )  # fmt: skip


def _window_keys(call: _Call, slab: Slab, spill: _Spill) -> None:
    """Gradients of the window's keys, in the near form also of entries."""
    near, p, ds, side = _beside(call, slab, spill)
    old, width, blocks = call.old, call.width, _rows(slab, call.heads) // (BLOCK * call.heads)
    t = call.tiles("window keys" + (" with entries" if near else ""))
    h, n = t["BH"], t["BN"]
    window_backward.window_keys[(blocks * (width // n),)](
        described(call.q, h, n), described(call.do, h, n),
        *(described(x, h, old) for x in spill.old), *(described(x, h, BLOCK) for x in spill.new),
        described(p, h, side), described(ds, h, side),
        spill.window_parts, spill.parts, spill.excess, spill.flags, slab.start,
        H=call.heads, D=width, OLD=old, NEW=BLOCK, NEAR=near, ROWS=ROWS, FULL=slab.form == "near", **t,
    )  # fmt: skip
    n = dividing(128, width)
    ahead = min(old, slab.start) // BLOCK
    sums.sum_window[(ahead + blocks, width // n)](
        spill.window_parts, call.dwindow, slab.start, call.segments.tokens, blocks, ahead,
        D=width, OLD=old, NEW=BLOCK, BN=n, num_warps=4,
    )  # fmt: skip
    if near:
        first, spans = _spans(call, slab)
        if spans.shape[1]:
            n = dividing(64, width)
            sums.sum_near[(spans.shape[1], width // n)](
                spill.parts, call.view.low, spans, call.dentries, slab.start, first, spans.shape[1],
                D=width, NEW=BLOCK, NEAR=NEAR, BN=n, BR=64, num_warps=4,
            )  # fmt: skip


def _spans(call: _Call, slab: Slab) -> tuple[int, Tensor]:
    """The slab's first entry, and for each of its entries the blocks that see it, int32 `[2, entries]`."""

    def make() -> tuple[int, Tensor]:
        low, high = call.view.seen
        block = torch.arange(slab.start, slab.stop, BLOCK)
        first, end = int(low[slab.start]), int(high[slab.stop - 1])
        entry = torch.arange(first, end)
        begin = torch.searchsorted(high[(block + BLOCK - 1).clamp(max=slab.stop - 1)].contiguous(), entry, right=True)
        stop = torch.searchsorted(low[block].contiguous(), entry, right=True)
        return first, torch.stack((begin, stop)).to(torch.int32).to(call.q.device, non_blocking=True)

    return call.segments.once(("spans", call.ratio, slab), make)


def _settle(call: _Call, slab: Slab, spill: _Spill, counts: Tensor | None, written: int) -> None:
    """What the rounding of o took, and the sink's gradient; `counts` in the gather form, tiles of `written` entries."""
    rows, view = _rows(slab, call.heads), call.view
    rounding.settle_slopes[(rows // ROWS,)](
        call.rests, spill.sums, rows, view.low, view.high, view.low if counts is None else counts, call.lse, call.delta,
        call.ratios, call.sink, call.sinks, spill.excess, spill.flags, slab.start, call.segments.tokens, slab.column,
        call.scale,
        H=call.heads, ROWS=ROWS, TILE=written, GATHER=counts is not None, num_warps=4,
    )  # fmt: skip


def _dense(call: _Call, slab: Slab, spill: _Spill, bits: Tensor | None) -> None:
    """Entries of the dense form, the keys of its window, and dq."""
    heads, width, old, view = call.heads, call.width, call.old, call.view
    rows, unit = _rows(slab, heads), max(ROWS // heads, 1)
    groups = triton.cdiv(slab.tokens, unit) * unit * heads // ROWS
    # If no token of the slab sees an entry, neither is read.
    entries, ds = call.window, spill.old[1]
    if slab.columns and call.entries is not None:
        entries, ds = call.entries, _matrix(spill.ds, rows, slab.columns)
        _pool_scores(call, slab, spill, bits, groups)
    _settle(call, slab, spill, None, COLUMNS)
    _window_keys(call, slab, spill)
    if slab.columns and call.entries is not None:
        _pool_keys(call, slab, spill)
    t = call.tiles("pool queries")
    k, n = t["BK"], t["BN"]
    before = min(k, old)
    ds_old, ds_new = spill.old[1], spill.new[1]
    pool_backward.pool_queries[(width // n, groups)](
        described(ds_old, ROWS, before), described(ds_new, ROWS, BLOCK), described(ds, ROWS, k),
        described(call.window, before, n), described(call.window, BLOCK, n), described(entries, k, n),
        described(call.dq, ROWS, n), described(call.o, rounding.PART.value, n), view.low, view.high, call.rests,
        call.sizes, slab.start, call.segments.tokens, slab.column, call.scale,
        H=heads, D=width, OLD=old, NEW=BLOCK, ROWS=ROWS, BO=before, **t,
    )  # fmt: skip


def _pool_scores(call: _Call, slab: Slab, spill: _Spill, bits: Tensor | None, groups: int) -> None:
    """P and dS of a dense slab's entries."""
    view, rows = call.view, _rows(slab, call.heads)
    p, ds = _matrix(spill.p, rows, slab.columns), _matrix(spill.ds, rows, slab.columns)
    t = call.tiles("pool scores")
    m, d = t["M"], t["BD"]
    pool_backward.pool_scores[(slab.columns // COLUMNS, groups * (ROWS // m))](
        described(call.q, m, d), described(call.do, m, d), described(call.entries, COLUMNS, d),
        described(p, m, COLUMNS), described(ds, m, COLUMNS), view.low if bits is None else bits,
        view.low, view.high, call.lse, call.delta, spill.sums, rows,
        slab.start, call.segments.tokens, slab.column, slab.columns // 32, call.scale,
        H=call.heads, D=call.width, ROWS=ROWS, BK=COLUMNS, CHOSEN=bits is not None, **t,
    )  # fmt: skip


def _pool_keys(call: _Call, slab: Slab, spill: _Spill) -> None:
    """Gradients of a dense slab's entries."""
    heads, width, rows = call.heads, call.width, _rows(slab, call.heads)
    p, ds = _matrix(spill.p, rows, slab.columns), _matrix(spill.ds, rows, slab.columns)
    plan = pool_backward.plan(call.view, slab, call.segments, call.ratio, heads)
    if len(plan.pieces) == 0 or call.entries is None:
        return
    t = call.tiles("pool keys")
    h, n = t["BH"], t["BN"]
    pool_backward.pool_keys[(len(plan.pieces) * (width // n),)](
        described(call.q, h, n), described(call.do, h, n), described(p, h, COLUMNS), described(ds, h, COLUMNS),
        spill.parts, plan.pieces, spill.excess, spill.flags, slab.start, slab.column,
        H=heads, D=width, BK=COLUMNS, ROWS=ROWS, GROUPS=pool_backward.GROUPS, **t,
    )  # fmt: skip
    n = dividing(128, width)
    sums.sum_pool[(slab.columns // COLUMNS * (COLUMNS // 16), width // n)](
        spill.parts, plan.order, plan.offsets, call.dentries, slab.column, len(call.entries),
        D=width, BK=COLUMNS, BR=16, BN=n, num_warps=4,
    )  # fmt: skip


def _gather(call: _Call, slab: Slab, spill: _Spill, rows: Tensor, counts: Tensor, deterministic: bool) -> None:
    """Entries of the gather form, the keys of its window, and dq."""
    heads, width, old, entries = call.heads, call.width, call.old, call.entries
    assert entries is not None and call.dentries is not None
    slots, m, here = rows.shape[1], max(heads, 16), _rows(slab, heads)
    ds = _matrix(spill.ds, here, slots)
    many = ", 128 heads" if heads == 128 else ""
    t = call.tiles("gather scores" + many)
    written, d, n = t["BK"], t["BD"], t["BN"]
    gather_backward.gather_scores[(slab.tokens * (slots // written),)](
        described(call.q, m, d), described(call.do, m, d), described(call.q, m, n), described(call.do, m, n),
        entries, rows, counts, described(ds, m, written), ds, call.lse, call.delta, spill.sums, here,
        call.dentries, spill.chosen_parts, slab.start, call.scale,
        SLOTS=slots, H=heads, D=width, M=m, ATOMIC=not deterministic, **t,
    )  # fmt: skip
    _settle(call, slab, spill, counts, written)
    _window_keys(call, slab, spill)
    d = dividing(32, width)
    gather_backward.gather_mended[(slab.tokens,)](
        described(call.q, m, d), described(call.q, m, n), entries, rows, counts, call.lse, spill.excess, spill.flags,
        call.dentries, spill.chosen_parts, slab.start, call.scale,
        SLOTS=slots, H=heads, D=width, ROWS=ROWS, M=m, BK=32, BD=d, BN=n, ATOMIC=not deterministic, num_warps=4,
    )  # fmt: skip
    if deterministic:
        count, n = min(slab.columns, len(entries) - slab.column), dividing(256, width)
        starts, order = invert(rows, slab.column, count)
        sums.sum_chosen[(count, width // n)](
            spill.chosen_parts, starts, order, call.dentries, slab.column,
            D=width, BR=32, BN=n, STAGES=3, num_warps=4,
        )  # fmt: skip
    t = call.tiles("gather queries" + many)
    k, n = t["BK"], t["BN"]
    before = min(k, old)
    gather_backward.gather_queries[(width // n, slab.tokens)](
        described(spill.old[1], m, before), described(spill.new[1], m, BLOCK), described(ds, m, k),
        described(call.window, before, n), described(call.window, BLOCK, n), entries, rows, counts,
        described(call.dq, m, n), call.dq, described(call.o, rounding.PART.value, n), call.rests, call.sizes,
        slab.start, call.scale,
        SLOTS=slots, H=heads, D=width, OLD=old, NEW=BLOCK, M=m, BO=before, **t,
    )  # fmt: skip


def invert(rows: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Who chose each entry `first <= n < first + count`, from `rows` int32 `[tokens, K]` (-1: none).

    Returns int32 `starts [count + 1]` and `order [tokens K]`: slot numbers entry after entry, each in the order of
    tokens.
    """
    kind = torch.int16 if count < 1 << 15 else torch.int32
    number = torch.where(rows < 0, count, rows - first).to(kind).flatten()
    value, order = torch.sort(number, stable=True)
    edges = torch.arange(count + 1, dtype=kind, device=rows.device)
    return torch.searchsorted(value, edges, out_int32=True), order.to(torch.int32)
