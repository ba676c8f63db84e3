"""Memory grows with tokens, not with their square: tensors in flight and tensors kept for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.ops import documents
from tests.ops.compare import Draw
from undertow.ops import Ops, Segments
from undertow.ops.reference import cross_entropy, tiles
from undertow.ops.segments import Rows, entry_rows, window_rows

MODES = pytest.mark.parametrize("invariant", [False, True])
SHORT, LONG = 256, 1024
WINDOW, RATIO, HEADS, WIDTH = 16, 4, 2, 8


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        storages = [t.untyped_storage().nbytes() // t.element_size() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.elements = max([self.elements, *storages])
        return out


def measure(run: Callable[..., Any], *inputs: Tensor) -> tuple[int, int]:
    """Elements of the largest tensor, forward and backward, and bytes that autograd keeps between them."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    leaves = [x.requires_grad_() for x in inputs]
    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outputs = run(*leaves)
        outputs = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if o.requires_grad]
        if outputs:
            torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs], allow_unused=True)
    return largest.elements, sum(kept.values())


def attention(kind: str, tokens: int, invariant: bool) -> tuple[int, int]:
    draw, segments = Draw(kind, tokens), Segments.from_lengths([tokens])
    ops = Ops(batch_invariant=invariant)
    positions = segments.positions[:, None]
    selected = torch.where(torch.arange(4) < (positions + 1) // RATIO, torch.arange(4), -1) if kind == "csa" else None

    def run(q: Tensor, latents: Tensor, entries: Tensor) -> Tensor:
        window = documents.rows([latents], window_rows(WINDOW), segments)
        held = documents.rows([entries], entry_rows(RATIO), segments)
        return ops.sparse_attention(
            q, window, None if kind == "swa" else held, selected, torch.zeros(HEADS), segments,
            window_size=WINDOW, ratio=RATIO, scale=1.0,
        )  # fmt: skip

    operands = draw.normal(tokens, HEADS, WIDTH), draw.normal(tokens, WIDTH), draw.normal(tokens // RATIO, WIDTH)
    return measure(run, *operands)


@MODES
@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
def test_attention(kind, invariant, monkeypatch):
    monkeypatch.setattr(tiles, "_BUDGET", 1 << 14)
    short, kept = attention(kind, SHORT, invariant)
    long, kept_long = attention(kind, LONG, invariant)
    assert long <= 4.1 * short
    # Scores fit the budget, however many entries one block sees; a selection costs a byte per query and entry of it.
    assert long <= 1.1 * max(tiles._BUDGET, LONG * HEADS * WIDTH)
    assert 0 < kept_long <= 4.1 * kept
    assert kept_long < 16 * LONG * HEADS * WIDTH


@MODES
def test_indexer_selection(invariant, monkeypatch):
    monkeypatch.setattr(tiles, "_BUDGET", 1 << 14)

    def select(tokens: int) -> tuple[int, int]:
        draw, segments = Draw(tokens), Segments.from_lengths([tokens])
        ops = Ops(batch_invariant=invariant)

        def run(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
            rows = documents.rows([keys], entry_rows(RATIO), segments)
            return ops.indexer_select(q, rows, weights, 8, segments, RATIO)

        operands = draw.normal(tokens, HEADS, WIDTH), draw.normal(tokens, HEADS), draw.normal(tokens // RATIO, WIDTH)
        return measure(run, *operands)

    (short, _), (long, kept) = select(SHORT), select(LONG)
    assert long <= 4.1 * short
    assert long < LONG * LONG // RATIO // 4
    assert kept == 0


@MODES
@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_distillation(stage, invariant, monkeypatch):
    """As `test_attention`: four times the tokens, four times what is kept, and no `[T, T / ratio]`."""
    monkeypatch.setattr(tiles, "_BUDGET", 1 << 14)

    def distil(tokens: int) -> tuple[int, int]:
        draw, segments = Draw(tokens), Segments.from_lengths([tokens])
        q, weights = draw.normal(tokens, HEADS, WIDTH), draw.normal(tokens, HEADS)
        keys, entries = (draw.normal(tokens // RATIO, WIDTH) for _ in range(2))
        limit = (segments.positions[:, None] + 1) // RATIO
        selected = torch.where(torch.arange(4) < limit, torch.arange(4), -1) if stage == "sparse" else None
        attention = draw.normal(tokens, HEADS, WIDTH), draw.normal(tokens, HEADS)
        rows, op = segments.layout(entry_rows(RATIO)), Ops(batch_invariant=invariant).indexer_distillation

        def run(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
            taught = attention[0], Rows(entries, rows), attention[1], selected
            return op(q, Rows(keys, rows), weights, *taught, segments, ratio=RATIO, scale=0.3)

        return measure(run, q, weights, keys)

    (_, kept), (long, kept_long) = distil(SHORT), distil(LONG)
    assert long <= 1.1 * max(tiles._BUDGET, LONG * HEADS * WIDTH)
    assert 0 < kept_long <= 4 * kept


@MODES
def test_cross_entropy(invariant, monkeypatch):
    """Logits of a chunk alone exist at once; nothing as large as they are is kept."""
    vocabulary, width = 200, 8
    monkeypatch.setattr(cross_entropy, "_CHUNK_ELEMENTS", 32 * vocabulary)

    def loss(tokens: int) -> tuple[int, int]:
        draw, ops = Draw(tokens), Ops(batch_invariant=invariant)
        labels = draw.integers(vocabulary, tokens)
        operands = draw.normal(tokens, width), draw.normal(vocabulary, width)
        return measure(lambda h, w: ops.linear_cross_entropy(h, w, labels, 1e-4), *operands)

    (short, kept), (long, kept_long) = loss(SHORT), loss(LONG)
    assert short <= 32 * vocabulary
    assert long <= max(32 * vocabulary, LONG * width)
    assert 0 < kept_long <= 4 * kept
    assert kept_long <= 4 * (LONG * (width + 4) + vocabulary * width)


def test_default_budget_bounds_what_long_documents_need():
    """At the shipped budget a document of 64 Ki tokens is cut into groups whose scores fit."""
    segments, heads, ratio = Segments.from_lengths([1 << 16]), 64, 4
    blocks = segments.blocks(tiles.block_size(segments))
    groups = list(tiles.groups_of_blocks(blocks, heads, lambda last: (last + 1) // ratio, False))
    assert [i for g in groups for i in range(g.start, g.stop)] == list(range(blocks.count))
    for group in groups:
        entries = max((last + 1) // ratio for last in blocks.last[group])
        fits = (group.stop - group.start) * blocks.size * heads * entries <= tiles._BUDGET
        assert fits or group.stop - group.start == 1
