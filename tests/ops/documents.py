"""Documents with a history, cut into calls, and the rows of it that a cache would hold in a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest

import torch
from hypothesis import strategies as st
from torch import Tensor

from undertow.ops.segments import RowKind, Rows, Segments


def rows(history: Sequence[Tensor], kind: RowKind, segments: Segments) -> Rows:
    """What a layer sees of `history[d]`, every row of document `d` from its first token to the end of this call: kept
    rows of all documents, then the rows of this call."""
    kept, added = [], []
    for h, past, new in zip(history, segments.past, segments.new, strict=True):
        before, after = past // kind.every, (past + new) // kind.every
        kept.append(h[before - kind.held(past) : before])
        added.append(h[before:after])
    return Rows(torch.cat([*kept, *added]), segments.layout(kind))


@dataclass(frozen=True)
class Schedule:
    """Documents that arrive in pieces: `pieces[d]` are the tokens of document `d` in each call."""

    pieces: tuple[tuple[int, ...], ...]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        return [sum(p) for p in self.pieces]

    @property
    def whole(self) -> Segments:
        """All documents in one call."""
        return Segments.from_lengths(self.lengths)

    def calls(self) -> Iterator[tuple[Segments, list[int]]]:
        """The documents of each call, and which rows of the whole call they are."""
        past, starts = [0] * len(self.pieces), [0, *accumulate(self.lengths)]
        for new in zip_longest(*self.pieces, fillvalue=0):
            flat = [s + i for s, p, n in zip(starts, past, new, strict=False) for i in range(p, p + n)]
            yield Segments.from_lengths(new, past), flat
            past = [p + n for p, n in zip(past, new, strict=True)]


def schedules(largest: int = 40, documents: int = 3, calls: int = 4) -> st.SearchStrategy[Schedule]:
    """Random schedules, with empty documents and calls without tokens among them."""
    size = st.one_of(st.just(0), st.just(1), st.integers(0, largest))
    piece = st.lists(size, min_size=1, max_size=calls).map(tuple)
    return st.lists(piece, min_size=1, max_size=documents).map(tuple).map(Schedule)
