"""Documents of one call as flat rows: the index arithmetic that packing, padding and incremental decode all share.

The model never sees `[batch, sequence]`. Tokens of all documents lie end to end in one axis `T`; a `Segments` says
which document owns which rows and how many tokens of it earlier calls have already put into a cache. Whatever a layer
keeps of earlier calls (window latents, compressed entries, open compressor rows) is a `Rows`: kept rows first, this
call's after them, found by document and index. Padding is therefore absent, a packed document is a document, a chunk
is a document with a past.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")


def _offsets(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)][: len(counts)]


def moved(table: Tensor, device: torch.device) -> Tensor:
    """A table made on the host, on `device`. A GPU gets it in its turn: neither waits for the other."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


def _table(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return moved(torch.tensor(numbers, dtype=torch.int64), device)


@dataclass(frozen=True)
class RowKind:
    """What a layer keeps of a document: one row per `every` tokens, of which `held(tokens)` remain after so many
    tokens."""

    name: str
    every: int
    held: Callable[[int], int]


@cache
def window_rows(window: int) -> RowKind:
    """Latents of the sliding window: a later token needs the `window - 1` rows before it."""
    return RowKind("window", 1, lambda tokens: min(tokens, window - 1))


@cache
def entry_rows(ratio: int) -> RowKind:
    """Compressed entries (or indexer keys), one per complete group of `ratio` tokens, kept for good."""
    return RowKind("entries", ratio, lambda tokens: tokens // ratio)


@cache
def tail_rows(ratio: int) -> RowKind:
    """Rows a compressor with overlap still needs: its open group and the complete group before that."""
    return RowKind("tail", 1, lambda tokens: tokens % ratio + (ratio if tokens >= ratio else 0))


class RowLayout:
    """Where rows of one kind lie: `[kept rows of every document | rows added by this call]`."""

    def __init__(self, kind: RowKind, past: Sequence[int], new: Sequence[int], device: torch.device):
        after = [p + n for p, n in zip(past, new, strict=True)]
        self.kind = kind
        self.kept = tuple(kind.held(p) for p in past)
        self.added = tuple(a // kind.every - p // kind.every for p, a in zip(past, after, strict=True))
        self.first = tuple(p // kind.every - k for p, k in zip(past, self.kept, strict=True))
        self._after = after
        self._device = device
        columns = [self.first, self.kept, self.added, _offsets(self.kept), _offsets(self.added)]
        self._table = _table(columns, device).view(5, len(self.kept))

    def locate(self, document: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Row of the `index`-th row ever made of each document, and whether it is held. Both shaped like the inputs."""
        first, kept, added, kept_start, added_start = self._table[:, document]
        relative = index - first
        row = torch.where(relative < kept, kept_start + relative, sum(self.kept) + added_start + relative - kept)
        valid = (relative >= 0) & (relative < kept + added)
        return torch.where(valid, row, 0), valid

    @cached_property
    def retained(self) -> Tensor:
        """Rows that the next call needs, document after document."""
        counts = [self.kind.held(n) for n in self._after]
        begin = [n // self.kind.every - count for n, count in zip(self._after, counts, strict=True)]
        document, step = spread(counts, self._device)
        return self.locate(document, _table(begin, self._device)[document] + step)[0]


@dataclass(frozen=True)
class Rows:
    """Rows of one kind, `[R, ...]`, with their layout. A paged cache offers the same two members over its pool."""

    data: Tensor
    layout: RowLayout

    def locate(self, document: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """See `RowLayout.locate`; rows index `data`."""
        return self.layout.locate(document, index)


def end_to_end(rows: object) -> bool:
    """Whether these are just the rows that the call adds, in its order: not those of a pool, and none of a past."""
    return isinstance(rows, Rows) and len(rows.data) == sum(rows.layout.added)


def spread(counts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """For counts `[c0, c1, ..]`: the owner of each of `sum(counts)` items and its number within the owner, both
    int64."""
    sizes = torch.tensor(list(counts), dtype=torch.int64)
    owner = torch.repeat_interleave(torch.arange(len(counts)), sizes)
    step = torch.arange(len(owner)) - torch.tensor(_offsets(counts), dtype=torch.int64)[owner]
    return moved(owner, device), moved(step, device)


@dataclass(frozen=True)
class QueryBlocks:
    """Queries cut into blocks at absolute multiples of `size`, so that a query's place never depends on its neighbours.

    `query [n, size]` is the flat row or -1, `document [n]` the owner, `first [n]` the position of the block's first
    slot.
    """

    size: int
    query: Tensor
    document: Tensor
    first: Tensor
    last: tuple[int, ...]
    full: bool

    @property
    def count(self) -> int:
        return len(self.last)


@dataclass(frozen=True)
class Segments:
    """Documents of one call: `new[i]` tokens of document `i` lie in the flat axis, after `past[i]` tokens seen
    before."""

    new: tuple[int, ...]
    past: tuple[int, ...]
    device: torch.device
    _memo: dict = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_lengths(
        cls, new: Sequence[int], past: Sequence[int] | None = None, device: torch.device | str = "cpu"
    ) -> Segments:
        """Documents of the given lengths in tokens, each continuing after `past` tokens (none by default)."""
        return cls(tuple(new), tuple(past) if past is not None else (0,) * len(new), torch.device(device))

    @property
    def tokens(self) -> int:
        """Length of the flat axis."""
        return sum(self.new)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returns, made once for all layers of a call; `key` names it and all that it depends on."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    @cached_property
    def _owner(self) -> tuple[Tensor, Tensor]:
        document, step = spread(self.new, self.device)
        return document, step + self.starts[document]

    @cached_property
    def starts(self) -> Tensor:
        """Position of each document's first token of this call, `[D]`."""
        return _table(self.past, self.device)

    @property
    def document(self) -> Tensor:
        """Document of each flat row, `[T]`."""
        return self._owner[0]

    @property
    def positions(self) -> Tensor:
        """Position of each flat row in its document, `[T]`."""
        return self._owner[1]

    def layout(self, kind: RowKind) -> RowLayout:
        """Layout of the rows of `kind` in this call, made once for all layers."""
        if kind not in self._memo:
            self._memo[kind] = RowLayout(kind, self.past, self.new, self.device)
        return self._memo[kind]

    def groups(self, ratio: int) -> tuple[Tensor, Tensor, Tensor]:
        """Groups of `ratio` tokens that this call touches: document `[G]`, number `[G]`, whether it is now complete
        `[G]`."""
        key = ("groups", ratio)
        if key not in self._memo:
            touched = [-(-(p + n) // ratio) - p // ratio if n else 0 for p, n in zip(self.past, self.new, strict=True)]
            document, step = spread(touched, self.device)
            ends = self.starts + _table(self.new, self.device)
            number = step + (self.starts // ratio)[document]
            self._memo[key] = document, number, (number + 1) * ratio <= ends[document]
        return self._memo[key]

    def completed(self, ratio: int) -> Tensor | None:
        """Which of these groups are now complete, int64 `[N]`; None for all of them. The device is not asked."""
        return self.once(("completed", ratio), lambda: self._completed(ratio))

    def _completed(self, ratio: int) -> Tensor | None:
        of, chosen = 0, []
        for past, new in zip(self.past, self.new, strict=True):
            touched, whole = (-(-(past + new) // ratio) - past // ratio, (past + new) // ratio - past // ratio)
            chosen += range(of, of + whole if new else of)
            of += touched if new else 0
        return None if len(chosen) == of else _table(chosen, self.device)

    def entry_positions(self, ratio: int) -> Tensor:
        """Rotary position of each entry that this call completes: the first own token of its group, `[N]`."""
        number, completed = self.groups(ratio)[1], self.completed(ratio)
        return (number if completed is None else number[completed]) * ratio

    def blocks(self, size: int) -> QueryBlocks:
        """The queries of this call in blocks of `size` slots."""
        key = ("blocks", size)
        if key not in self._memo:
            counts = [-(-(p + n) // size) - p // size if n else 0 for p, n in zip(self.past, self.new, strict=True)]
            document, step = spread(counts, torch.device("cpu"))
            past, new = torch.tensor(self.past, dtype=torch.int64), torch.tensor(self.new, dtype=torch.int64)
            first = (step + past[document] // size) * size
            relative = first[:, None] + torch.arange(size) - past[document][:, None]
            held = (relative >= 0) & (relative < new[document][:, None])
            start = torch.tensor(_offsets(self.new), dtype=torch.int64)
            query = torch.where(held, relative + start[document][:, None], -1)
            last = torch.minimum(first + size, (past + new)[document]) - 1
            self._memo[key] = QueryBlocks(
                size, moved(query, self.device), moved(document, self.device), moved(first, self.device),
                tuple(last.tolist()), bool(held.all()),
            )  # fmt: skip
        return self._memo[key]

    def without_last(self) -> tuple[Segments, Tensor]:
        """The same documents less their last token, and the flat rows that remain `[T']`."""
        if "without_last" not in self._memo:
            shorter = Segments.from_lengths([max(n - 1, 0) for n in self.new], self.past, self.device)
            document, step = spread(shorter.new, self.device)
            start = _table(_offsets(self.new), self.device)
            self._memo["without_last"] = shorter, start[document] + step
        return self._memo["without_last"]
