"""Index arithmetic of documents against plain lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops import documents
from tests.ops.naive import queries
from undertow.ops.segments import Segments, entry_rows, spread, tail_rows, window_rows

KINDS = [
    *(window_rows(w) for w in (1, 2, 5, 128)),
    *(entry_rows(r) for r in (2, 4, 128)),
    *(tail_rows(r) for r in (2, 4, 7)),
]
COUNT = st.one_of(st.just(0), st.integers(0, 300))
CALLS = st.lists(st.tuples(COUNT, COUNT), min_size=1, max_size=5)


def segments_of(call: list[tuple[int, int]]) -> Segments:
    return Segments.from_lengths([new for _, new in call], [past for past, _ in call])


@given(CALLS)
def test_positions_and_documents(call):
    segments = segments_of(call)
    expected = queries(segments.new, segments.past)
    assert segments.tokens == len(expected)
    assert list(zip(segments.document.tolist(), segments.positions.tolist(), strict=True)) == expected
    assert segments.starts.tolist() == [past for past, _ in call]


def test_past_is_zero_by_default():
    segments = Segments.from_lengths([2, 0, 3])
    assert segments.past == (0, 0, 0)
    assert segments.positions.tolist() == [0, 1, 0, 1, 2]
    assert segments.document.tolist() == [0, 0, 2, 2, 2]


def test_held_rows_of_each_kind():
    assert [window_rows(4).held(n) for n in range(6)] == [0, 1, 2, 3, 3, 3]
    assert [window_rows(1).held(n) for n in (0, 1, 9)] == [0, 0, 0]
    assert [entry_rows(4).held(n) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    # An overlapping window needs the open group and the complete group before it.
    assert [tail_rows(4).held(n) for n in (0, 1, 3, 4, 5, 7, 8, 9)] == [0, 1, 3, 4, 5, 7, 4, 5]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: f"{k.name}-{k.every}-{k.held(1000)}")
@given(call=CALLS)
def test_locate_finds_every_held_row_and_no_other(kind, call):
    segments = segments_of(call)
    # A row's content is (document, its number ever made): what `locate` finds must say so itself.
    history = [
        torch.tensor([[d, i] for i in range((past + new) // kind.every)], dtype=torch.int64).view(-1, 2)
        for d, (past, new) in enumerate(call)
    ]
    rows = documents.rows(history, kind, segments)
    for d, (past, new) in enumerate(call):
        made, total = past // kind.every, (past + new) // kind.every
        index = torch.arange(-3, total + 3)
        row, valid = rows.locate(torch.full_like(index, d), index)
        assert valid.tolist() == [made - kind.held(past) <= i < total for i in index.tolist()]
        assert (row[~valid] == 0).all()
        assert rows.data[row[valid]].tolist() == [[d, i] for i in index[valid].tolist()]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: f"{k.name}-{k.every}-{k.held(1000)}")
@given(call=CALLS)
def test_retained_rows_are_those_the_next_call_keeps(kind, call):
    segments = segments_of(call)
    made = [(past + new) // kind.every for past, new in call]
    history = [torch.tensor([[d, i] for i in range(n)]).view(-1, 2) for d, n in enumerate(made)]
    retained = documents.rows(history, kind, segments).data[segments.layout(kind).retained]
    held = [kind.held(past + new) for past, new in call]
    expected = [[d, i] for d, (n, count) in enumerate(zip(made, held, strict=True)) for i in range(n - count, n)]
    assert retained.tolist() == expected


def test_locate_broadcasts_documents_over_indices():
    segments = Segments.from_lengths([3, 2], [4, 0])
    document = torch.tensor([[1], [0]])
    row, valid = segments.layout(entry_rows(2)).locate(document, torch.arange(4).expand(2, -1))
    assert valid.tolist() == [[True, False, False, False], [True, True, True, False]]
    assert row.tolist() == [[3, 0, 0, 0], [0, 1, 2, 0]]


@pytest.mark.parametrize("ratio", [2, 4, 128])
@given(call=CALLS)
def test_groups_and_entry_positions(ratio, call):
    segments = segments_of(call)
    expected = [
        (d, number, (number + 1) * ratio <= past + new)
        for d, (past, new) in enumerate(call)
        for number in dict.fromkeys(t // ratio for t in range(past, past + new))
    ]
    document, number, complete = segments.groups(ratio)
    assert list(zip(document.tolist(), number.tolist(), complete.tolist(), strict=True)) == expected
    completed = segments.completed(ratio)
    completed = torch.arange(len(complete)) if completed is None else completed
    assert completed.tolist() == complete.nonzero()[:, 0].tolist()
    assert segments.entry_positions(ratio).tolist() == [n * ratio for _, n, done in expected if done]
    assert len(segments.entry_positions(ratio)) == sum(segments.layout(entry_rows(ratio)).added)


@pytest.mark.parametrize("size", [1, 4, 32])
@given(call=CALLS)
def test_blocks_are_anchored_to_absolute_positions(size, call):
    segments = segments_of(call)
    expected = []
    flat = {query: row for row, query in enumerate(queries(segments.new, segments.past))}
    for d, (past, new) in enumerate(call):
        for first in dict.fromkeys(t // size * size for t in range(past, past + new)):
            slots = [flat.get((d, first + i), -1) for i in range(size)]
            expected.append((d, first, min(first + size, past + new) - 1, slots))
    blocks = segments.blocks(size)
    assert blocks.count == len(expected)
    assert blocks.size == size
    found = zip(blocks.document.tolist(), blocks.first.tolist(), blocks.last, blocks.query.tolist(), strict=True)
    assert list(found) == expected
    assert blocks.full == all(slot >= 0 for _, _, _, slots in expected for slot in slots)


@given(CALLS)
def test_without_last(call):
    segments = segments_of(call)
    shorter, rows = segments.without_last()
    last = {(d, past + new - 1) for d, (past, new) in enumerate(call) if new}
    kept = [(row, query) for row, query in enumerate(queries(segments.new, segments.past)) if query not in last]
    assert rows.tolist() == [row for row, _ in kept]
    assert queries(shorter.new, shorter.past) == [query for _, query in kept]
    assert len(shorter.new) == len(segments.new)


@given(st.lists(st.integers(0, 5), max_size=6))
def test_spread(counts):
    owner, step = spread(counts, torch.device("cpu"))
    assert owner.tolist() == [d for d, n in enumerate(counts) for _ in range(n)]
    assert step.tolist() == [i for n in counts for i in range(n)]


def test_layouts_and_blocks_are_made_once():
    segments = Segments.from_lengths([5])
    assert segments.layout(window_rows(4)) is segments.layout(window_rows(4))
    assert segments.blocks(4) is segments.blocks(4)
    assert segments.groups(4) is segments.groups(4)
    assert segments.without_last() is segments.without_last()


def test_what_depends_on_documents_alone_is_made_once():
    segments, made = Segments.from_lengths([3]), []
    assert [segments.once(("number", 1), lambda: made.append(1) or 7) for _ in range(2)] == [7, 7] and made == [1]
    assert segments.once(("number", 2), lambda: None) is None
    assert segments.once(("number", 2), lambda: 5) is None


def test_equal_documents_make_equal_segments():
    first, second = Segments.from_lengths([3, 4], [1, 0]), Segments.from_lengths([3, 4], [1, 0])
    first.layout(window_rows(2))
    assert first == second
    assert first != Segments.from_lengths([3, 4])


@pytest.mark.parametrize("kind", [window_rows(4), entry_rows(4), tail_rows(4)], ids=lambda k: k.name)
def test_a_call_without_documents(kind):
    segments = Segments.from_lengths([])
    assert segments.tokens == 0
    assert segments.positions.shape == segments.document.shape == segments.starts.shape == (0,)
    assert segments.layout(kind).retained.shape == (0,)
    assert [len(x) for x in segments.groups(4)] == [0, 0, 0]
    assert segments.blocks(8).count == 0
    assert segments.without_last()[1].shape == (0,)
