"""Lightning indexer: scores and selection against loops, causal to the token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops import documents, naive
from tests.ops.compare import DTYPES, TOLERANCE, Draw, check, gradients, relative
from undertow.ops.reference import tiles
from undertow.ops.reference.indexer import indexer_scores, indexer_select
from undertow.ops.segments import Rows, Segments, entry_rows

RATIO, HEADS, WIDTH = 4, 8, 16
MODES = pytest.mark.parametrize("invariant", [False, True])
CASES = [
    ([30], [0]),
    ([1], [0]),
    ([5, 0, 3, 41], [0, 0, 0, 0]),
    ([3, 7, 0, 1], [2, 9, 5, 63]),
    ([1, 1, 1], [7, 40, 2]),
    ([0, 0], [3, 0]),
]


def operands(new: Sequence[int], past: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple:
    """Queries, the keys of every document from its first token on, head weights."""
    draw = Draw(tuple(new), tuple(past))
    tokens = sum(new)
    keys = [draw.normal((p + n) // RATIO, WIDTH, dtype=dtype) for p, n in zip(past, new, strict=True)]
    weights = draw.normal(tokens, HEADS, dtype=dtype, scale=(HEADS * WIDTH) ** -0.5)
    return draw.normal(tokens, HEADS, WIDTH, dtype=dtype), weights, keys


def matrix(scores: Sequence[Tensor], columns: int) -> Tensor:
    """Scores of all queries as one `[T, columns]` matrix, `-inf` elsewhere."""
    rows = [torch.cat([s, s.new_full((columns - len(s),), -torch.inf)]) for s in scores]
    return torch.stack(rows) if rows else torch.zeros(0, columns)


@MODES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("new", "past"), CASES)
def test_scores(new, past, dtype, invariant):
    segments = Segments.from_lengths(new, past)
    q, weights, keys = operands(new, past, dtype)
    longest = max((p + n) // RATIO for p, n in zip(past, new, strict=True))

    def op(q: Tensor, weights: Tensor, *keys: Tensor) -> Tensor:
        rows = documents.rows(keys, entry_rows(RATIO), segments)
        scores = indexer_scores(q, rows, weights, segments, RATIO, invariant=invariant)
        assert scores.shape == (len(q), longest)
        visible = (segments.positions[:, None] + 1) // RATIO > torch.arange(longest)
        assert torch.equal(scores == -torch.inf, ~visible)
        return scores.masked_fill(~visible, 0.0)

    def definition(q: Tensor, weights: Tensor, *keys: Tensor) -> Tensor:
        scores = naive.indexer_scores(q, keys, weights, new, past, RATIO)
        found = matrix(scores, longest)
        return found.masked_fill(found.isneginf(), 0.0)

    check(op, definition, [q, weights, *keys], TOLERANCE[dtype] if dtype != torch.bfloat16 else 1e-2)


def test_scores_are_float32_for_a_bfloat16_model():
    q, weights, keys = operands([9], [0], torch.bfloat16)
    segments = Segments.from_lengths([9])
    assert indexer_scores(q, documents.rows(keys, entry_rows(RATIO), segments), weights, segments, RATIO).dtype == (
        torch.float32
    )


@MODES
@pytest.mark.parametrize("k", [1, 3, 100])
@pytest.mark.parametrize(("new", "past"), CASES)
def test_selection(new, past, k, invariant):
    segments = Segments.from_lengths(new, past)
    q, weights, keys = operands(new, past, torch.float64)
    rows = documents.rows(keys, entry_rows(RATIO), segments)
    found = indexer_select(q, rows, weights, k, segments, RATIO, invariant=invariant)
    scores = naive.indexer_scores(q, keys, weights, new, past, RATIO)
    assert found.dtype == torch.int64
    assert found.tolist() == [naive.best(s.tolist(), k) for s in scores]


@MODES
@pytest.mark.parametrize("length", [1, 3, 4, 5, 64, 131])
def test_no_query_selects_an_entry_of_its_future(length, invariant):
    segments = Segments.from_lengths([length])
    q, weights, keys = operands([length], [0])
    rows = documents.rows(keys, entry_rows(RATIO), segments)
    found = indexer_select(q, rows, weights, 1000, segments, RATIO, invariant=invariant)
    for position, picks in enumerate(found.tolist()):
        visible = (position + 1) // RATIO
        assert sorted(s for s in picks if s >= 0) == list(range(visible))
        assert picks.count(-1) == 1000 - visible


@MODES
def test_equal_scores_go_to_the_lowest_entry(invariant):
    segments = Segments.from_lengths([160])
    q, weights, _ = operands([160], [0])
    keys = Draw("ties").normal(1, WIDTH).expand(40, -1).clone()
    rows = Rows(keys, segments.layout(entry_rows(RATIO)))
    found = indexer_select(q, rows, weights, 5, segments, RATIO, invariant=invariant)
    assert found[159].tolist() == [0, 1, 2, 3, 4]
    keys[7] = -keys[7]
    found = indexer_select(q.abs(), rows, -weights.abs(), 5, segments, RATIO, invariant=invariant)
    scores = indexer_scores(q.abs(), rows, -weights.abs(), segments, RATIO, invariant=invariant)
    assert found.tolist() == [naive.best(row[~row.isneginf()].tolist(), 5) for row in scores]


@MODES
def test_zero_scores_of_all_heads_keep_their_order(invariant):
    """The ReLU zeroes every head: signed zeros are ties."""
    segments = Segments.from_lengths([80])
    q, keys = torch.ones(80, HEADS, WIDTH), -torch.ones(20, WIDTH)
    rows, weights = Rows(keys, segments.layout(entry_rows(RATIO))), Draw("zeros").normal(80, HEADS)
    found = indexer_select(q, rows, weights, 4, segments, RATIO, invariant=invariant)
    assert found[79].tolist() == [0, 1, 2, 3]


@MODES
def test_entry_zero_and_fills_are_told_apart(invariant):
    """Early queries see entry 0 alone: it is selected once, the rest is fill, whatever the sign of its score."""
    segments = Segments.from_lengths([8])
    q, weights, keys = operands([8], [0])
    rows = documents.rows(keys, entry_rows(RATIO), segments)
    for sign in (1.0, -1.0):
        found = indexer_select(q, rows, sign * weights, 3, segments, RATIO, invariant=invariant)
        assert found[:3].tolist() == [[-1, -1, -1]] * 3
        assert found[3:7].tolist() == [[0, -1, -1]] * 4
        assert sorted(found[7].tolist()) == [-1, 0, 1]


@settings(max_examples=25)
@given(schedule=documents.schedules(), k=st.integers(1, 6))
def test_selection_of_pieces_is_that_of_the_whole(schedule, k):
    q, weights, keys = operands(schedule.lengths, [0] * len(schedule.lengths))
    kind = entry_rows(RATIO)
    rows = documents.rows(keys, kind, schedule.whole)
    whole = indexer_select(q, rows, weights, k, schedule.whole, RATIO, invariant=True)
    for segments, flat in schedule.calls():
        made = [(p + n) // RATIO for p, n in zip(segments.past, segments.new, strict=True)]
        rows = documents.rows([key[:n] for key, n in zip(keys, made, strict=True)], kind, segments)
        part = indexer_select(q[flat], rows, weights[flat], k, segments, RATIO, invariant=True)
        assert torch.equal(part, whole[flat])


def test_groups_of_blocks_change_nothing_but_rounding(monkeypatch):
    segments = Segments.from_lengths([150, 9, 70])
    q, weights, keys = operands([150, 9, 70], [0, 0, 0])
    rows = documents.rows(keys, entry_rows(RATIO), segments)
    want = indexer_scores(q, rows, weights, segments, RATIO)
    monkeypatch.setattr(tiles, "_BUDGET", 1)
    got = indexer_scores(q, rows, weights, segments, RATIO)
    finite = ~want.isneginf()
    assert torch.equal(got.isneginf(), want.isneginf())
    assert relative(got[finite], want[finite]) < 1e-6


@MODES
def test_selection_has_no_gradient_and_scores_have(invariant):
    segments = Segments.from_lengths([12])
    q, weights, (keys,) = (x if isinstance(x, list) else x.requires_grad_() for x in operands([12], [0]))
    rows = Rows(keys.requires_grad_(), segments.layout(entry_rows(RATIO)))
    assert not indexer_select(q, rows, weights, 2, segments, RATIO, invariant=invariant).requires_grad
    scores = indexer_scores(q, rows, weights, segments, RATIO, invariant=invariant)
    probabilities = torch.softmax(scores[3:], -1)
    grads = gradients(probabilities, [q, weights, keys])
    assert all(torch.isfinite(g).all() for g in grads)
    assert (grads[0][:3] == 0).all()
    assert grads[2].abs().sum() > 0
