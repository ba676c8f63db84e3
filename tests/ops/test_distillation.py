"""Indexer distillation and recall against loops: both stages, packed documents, histories, selections of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.ops import documents, naive
from tests.ops.compare import Draw, check, gradients, relative, same_bits
from undertow.ops import Ops
from undertow.ops.reference import tiles
from undertow.ops.reference.attention import sparse_attention
from undertow.ops.reference.distillation import indexer_distillation, indexer_recall
from undertow.ops.segments import Rows, Segments, entry_rows, window_rows

RATIO, HEADS, WIDTH, INDEX_HEADS, INDEX_WIDTH, WINDOW = 4, 3, 8, 5, 6, 7
SCALE = WIDTH**-0.5
MODES = pytest.mark.parametrize("invariant", [False, True])
STAGES = pytest.mark.parametrize("stage", ["dense", "sparse"])
CASES = [
    ([30], [0]),
    ([1], [0]),
    ([3, 131], [0, 0]),
    ([5, 0, 3, 41], [0, 0, 0, 0]),
    ([3, 7, 0, 1], [2, 9, 5, 63]),
    ([0, 0], [3, 0]),
]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 1e-2}


class Lesson(NamedTuple):
    """The indexer's operands, and the attention that teaches it; lists hold one tensor a document."""

    q: Tensor
    weights: Tensor
    keys: list[Tensor]
    attention_q: Tensor
    entries: list[Tensor]
    lse: Tensor
    selected: Tensor | None
    segments: Segments

    def rows(self, history: Sequence[Tensor]) -> Rows:
        return documents.rows(history, entry_rows(RATIO), self.segments)

    def op(self, invariant: bool = False):
        def run(q: Tensor, weights: Tensor, *keys: Tensor) -> Tensor:
            return indexer_distillation(
                q, self.rows(keys), weights, self.attention_q, self.rows(self.entries), self.lse, self.selected,
                self.segments, ratio=RATIO, scale=SCALE, invariant=invariant,
            )  # fmt: skip

        return run

    def mass(self, selected: Tensor | None) -> list[tuple[list[int], Tensor]]:
        entries, q, lse = [x.double() for x in self.entries], self.attention_q.double(), self.lse.double()
        return naive.entry_mass(q, entries, lse, selected, self.segments.new, self.segments.past, RATIO, SCALE)

    def definition(self, q: Tensor, weights: Tensor, *keys: Tensor) -> Tensor:
        masses = self.mass(self.selected)
        return naive.indexer_distillation(q, keys, weights, masses, self.segments.new, self.segments.past)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.q, self.weights, *self.keys]


def selection(draw: Draw, segments: Segments, k: int) -> Tensor:
    """Entries some of which are not visible or named twice, and -1."""
    return torch.stack([draw.integers(2 + (t + 1) // RATIO, k) - 1 for t in segments.positions.tolist()] or [
        torch.zeros(k, dtype=torch.int64)])[: segments.tokens]  # fmt: skip


def lesson(new: Sequence[int], past: Sequence[int], stage: str, dtype: torch.dtype = torch.float32) -> Lesson:
    draw = Draw(tuple(new), tuple(past), stage)
    segments, tokens = Segments.from_lengths(new, past), sum(new)
    history = [p + n for p, n in zip(past, new, strict=True)]
    entries = [draw.normal(n // RATIO, WIDTH, dtype=dtype) for n in history]
    window = [draw.normal(n, WIDTH, dtype=dtype) for n in history]
    attention_q = draw.normal(tokens, HEADS, WIDTH, dtype=dtype, scale=2.0)
    selected = selection(draw, segments, 4) if stage == "sparse" else None
    _, lse = sparse_attention(
        attention_q, documents.rows(window, window_rows(WINDOW), segments),
        documents.rows(entries, entry_rows(RATIO), segments), selected, draw.normal(HEADS), segments,
        window_size=WINDOW, ratio=RATIO, scale=SCALE,
    )  # fmt: skip
    keys = [draw.normal(n // RATIO, INDEX_WIDTH, dtype=dtype) for n in history]
    return Lesson(
        draw.normal(tokens, INDEX_HEADS, INDEX_WIDTH, dtype=dtype), draw.normal(tokens, INDEX_HEADS, dtype=dtype),
        keys, attention_q, entries, lse, selected, segments,
    )  # fmt: skip


@MODES
@STAGES
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("new", "past"), CASES)
def test_divergence_and_gradients(new, past, stage, dtype, invariant):
    taught = lesson(new, past, stage, dtype)
    check(taught.op(invariant), taught.definition, taught.leaves, TOLERANCE[dtype])


@STAGES
@pytest.mark.parametrize("budget", [1, 1500, 9000])
def test_entries_in_chunks(stage, budget, monkeypatch):
    """One entry at a time, part of a row, groups of blocks."""
    monkeypatch.setattr(tiles, "_BUDGET", budget)
    taught = lesson([45, 2, 101], [0, 30, 0], stage, torch.float64)
    check(taught.op(), taught.definition, taught.leaves, 1e-11)


@MODES
@STAGES
def test_gradcheck(stage, invariant):
    taught = lesson([13, 6], [0, 3], stage, torch.float64)
    leaves = [x.requires_grad_() for x in taught.leaves]
    assert torch.autograd.gradcheck(taught.op(invariant), leaves, fast_mode=True)


def test_only_the_indexer_gets_gradients():
    taught = lesson([30], [0], "dense")
    taught.attention_q.requires_grad_(), taught.entries[0].requires_grad_()
    leaves = [x.requires_grad_() for x in taught.leaves]
    taught.op()(*leaves).sum().backward()
    assert taught.attention_q.grad is None and taught.entries[0].grad is None
    assert all(x.grad is not None and x.grad.abs().max() > 0 for x in leaves)


def test_an_indexer_that_agrees_has_nothing_to_learn():
    """One head of each whose score is the attention's logit plus a constant: both softmaxes are the same."""
    draw = Draw("agrees")
    segments = Segments.from_lengths([40])
    entries = draw.normal(10, WIDTH, dtype=torch.float64).abs()
    q = draw.normal(40, 1, WIDTH, dtype=torch.float64).abs()
    weights = torch.full((40, 1), SCALE, dtype=torch.float64)
    rows = Rows(entries, segments.layout(entry_rows(RATIO)))
    lse = draw.normal(40, 1, dtype=torch.float64)
    leaf = q.clone().requires_grad_()
    kl = indexer_distillation(leaf, rows, weights, q, rows, lse, None, segments, ratio=RATIO, scale=SCALE)
    assert kl.abs().max() < 1e-14
    assert gradients(kl, [leaf], [torch.ones(40, dtype=torch.float64)])[0].abs().max() < 1e-14


@MODES
def test_queries_without_entries_contribute_nothing(invariant):
    taught = lesson([3, 11], [0, 0], "sparse")
    taught.selected[:] = -1
    leaves = [x.requires_grad_() for x in taught.leaves]
    kl = taught.op(invariant)(*leaves)
    assert kl.shape == (14,) and (kl == 0).all()
    assert all((g == 0).all() for g in gradients(kl, leaves))


@MODES
def test_nothing_to_attend_to(invariant):
    """Entries that attention gives no weight, even none that float32 can hold: no NaN, and no target to pull to."""
    taught = lesson([30], [0], "dense")
    taught = taught._replace(lse=taught.lse + 1e4)
    leaves = [x.requires_grad_() for x in taught.leaves]
    kl = taught.op(invariant)(*leaves)
    assert (kl == 0).all() and all((g == 0).all() for g in gradients(kl, leaves))


@STAGES
def test_repeated_and_absent_picks_change_no_bit(stage):
    taught = lesson([61], [0], "sparse")
    order = Draw("order").order(4)
    more = torch.cat([taught.selected[:, order], taught.selected[:, :2], torch.full((61, 1), -1)], 1)
    other = taught._replace(selected=more)
    results = []
    for one in (taught, other):
        leaves = [x.detach().clone().requires_grad_() for x in one.leaves]
        kl = one.op()(*leaves)
        results.append((kl, *gradients(kl, leaves)))
    assert same_bits(*results)


def test_large_scores_stay_finite_in_bf16():
    taught = lesson([130, 7], [0, 0], "dense", torch.bfloat16)
    leaves = [(30 * x).detach().requires_grad_() for x in taught.leaves]
    kl = taught.op()(*leaves)
    assert kl.dtype == torch.float32 and torch.isfinite(kl).all() and kl.max() > 1e3
    assert all(torch.isfinite(g).all() for g in gradients(kl, leaves))


@STAGES
def test_invariant_to_what_shares_the_call(stage):
    """Document by document, and piece by piece, the bits of the whole; the counts of recall add up."""
    ops, k = Ops(batch_invariant=True), 4
    taught = lesson([75, 3, 200], [0, 0, 0], stage)
    picks = selection(Draw("picks"), taught.segments, k)
    where = dict(ratio=RATIO, scale=SCALE)
    whole = taught.op(True)(*taught.leaves)
    counts = ops.indexer_recall(
        taught.attention_q, taught.rows(taught.entries), taught.lse, picks, k, taught.segments, **where
    )
    for document, (start, cuts) in enumerate([(0, (0, 40, 75)), (75, (0, 1, 3)), (78, (0, 129, 130, 200))]):
        for begin, end in pairwise(cuts):
            segments, part = Segments.from_lengths([end - begin], [begin]), slice(start + begin, start + end)
            keys, entries = (
                documents.rows([history[document][: end // RATIO]], entry_rows(RATIO), segments)
                for history in (taught.keys, taught.entries)
            )
            attention = taught.attention_q[part], entries, taught.lse[part]
            selected = None if taught.selected is None else taught.selected[part]
            got = ops.indexer_distillation(
                taught.q[part], keys, taught.weights[part], *attention, selected, segments, **where
            )
            assert torch.equal(got, whole[part]), (document, begin)
            counts -= ops.indexer_recall(*attention, picks[part], k, segments, **where)
    assert counts.tolist() == [0, 0]


@MODES
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(("new", "past"), CASES)
def test_recall(new, past, k, invariant):
    taught = lesson(new, past, "dense")
    selected = selection(Draw(k), taught.segments, k)
    hits = of = 0
    for (_, mass), picks in zip(taught.mass(None), selected.tolist(), strict=True):
        if len(mass) > k:
            heaviest = naive.best(mass.tolist(), k)
            hits, of = hits + len(set(heaviest) & set(picks)), of + k
    got = indexer_recall(
        taught.attention_q, taught.rows(taught.entries), taught.lse, selected, k, taught.segments,
        ratio=RATIO, scale=SCALE, invariant=invariant,
    )  # fmt: skip
    assert (got.dtype, got.tolist()) == (torch.int64, [hits, of])
    if new == [3, 131]:
        assert 0 < hits < of


def test_a_head_counts_by_its_weight_on_entries():
    """Two heads of opposite taste: the one that gives entries more of its attention decides the target."""
    segments = Segments.from_lengths([8])
    entries = Rows(torch.tensor([[4.0], [-4.0]]), segments.layout(entry_rows(RATIO)))
    q = torch.tensor([[1.0], [-1.0]]).expand(8, 2, 1)
    lse = torch.tensor([4.0, 8.0]).expand(8, 2)  # exp(4 - 4) for the first head's favourite, exp(4 - 8) for the other's
    where = dict(ratio=RATIO, scale=1.0)
    first = torch.zeros(8, 1, dtype=torch.int64)
    assert indexer_recall(q, entries, lse, first, 1, segments, **where).tolist() == [1, 1]
    assert indexer_recall(q, entries, lse.flip(1), first, 1, segments, **where).tolist() == [0, 1]
    index_q, weights = torch.zeros(8, 1, 1), torch.ones(8, 1)
    kl = indexer_distillation(index_q, entries, weights, q, entries, lse, None, segments, **where)
    mass = torch.tensor([[0.0, -12.0], [-8.0, -4.0]], dtype=torch.float64).exp().sum(1)
    share = mass / mass.sum()
    assert (kl[:7] == 0).all() and relative(kl[7], (share * (2 * share).log()).sum()) < 1e-6
