"""NaN and infinity of one document never reach another one's outputs or gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops import documents
from tests.ops.compare import Draw, same_bits
from tests.ops.test_invariance import ROW_OPS, ROWS
from undertow.ops import Ops
from undertow.ops.segments import RowKind, Rows, Segments, entry_rows, tail_rows, window_rows

POISONS = pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")], ids=["nan", "inf", "-inf"])
MODES = pytest.mark.parametrize("invariant", [False, True])
WINDOW, RATIO, HEADS, WIDTH = 5, 4, 2, 6
# Documents that share groups of blocks: one without an entry, one without tokens (it owns row 0 of all that is kept),
# two with a past.
SEGMENTS = Segments.from_lengths((9, 3, 0, 22), (0, 0, 6, 13))
POISONED = pytest.mark.parametrize("document", [0, 1, 2, 3])


def owners(every: int) -> Tensor:
    """Document of each row ever made, one per `every` tokens."""
    counts = [(p + n) // every for p, n in zip(SEGMENTS.past, SEGMENTS.new, strict=True)]
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def held(x: Tensor, kind: RowKind) -> Rows:
    """Rows of the call from every document's history, end to end in `x`."""
    counts = torch.bincount(owners(kind.every), minlength=len(SEGMENTS.new)).tolist()
    return documents.rows(x.split(counts), kind, SEGMENTS)


def poison_rows(x: Tensor, bad: Tensor, value: float) -> Tensor:
    return torch.where(bad.view(-1, *(1,) * (x.dim() - 1)), value, x)


def results(
    run: Callable[..., Any], operands: Sequence[Tensor], bad: Sequence[Tensor], bad_output: Tensor, value: float | None
) -> list[Tensor]:
    """Rows of outputs and gradients that are not `bad`, those being poisoned with `value` in operands and upstream."""
    leaves = [x.clone() if value is None else poison_rows(x, b, value) for x, b in zip(operands, bad, strict=True)]
    outputs = run(*(x.requires_grad_() for x in leaves))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    smooth = [o for o in outputs if o.requires_grad]
    upstream = [Draw("up", i).normal(*o.shape, dtype=o.dtype) for i, o in enumerate(smooth)]
    if value is not None:
        upstream = [poison_rows(g, bad_output, value) for g in upstream]
    grads = torch.autograd.grad(smooth, leaves, upstream)
    return [*(o.detach()[~bad_output] for o in outputs), *(g[~b] for g, b in zip(grads, bad, strict=True))]


def compare(run: Callable[..., Any], operands: Sequence[Tensor], bad: Sequence[Tensor], out: Tensor, value: float):
    want = results(run, operands, bad, out, None)
    assert all(torch.isfinite(x).all() for x in want)
    assert same_bits(tuple(results(run, operands, bad, out, value)), tuple(want))


@MODES
@POISONS
@POISONED
@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
def test_attention(kind, document, poison, invariant):
    ops, draw = Ops(batch_invariant=invariant), Draw(kind)
    bad = [SEGMENTS.document == document, owners(1) == document, owners(RATIO) == document]
    operands = [draw.normal(len(bad[0]), HEADS, WIDTH), *(draw.normal(len(b), WIDTH) for b in bad[1:])]
    selected = torch.arange(3).expand(SEGMENTS.tokens, -1) if kind == "csa" else None

    def run(q: Tensor, latents: Tensor, entries: Tensor | None = None) -> Tensor:
        return ops.sparse_attention(
            q, held(latents, window_rows(WINDOW)), None if entries is None else held(entries, entry_rows(RATIO)),
            selected, torch.zeros(HEADS), SEGMENTS, window_size=WINDOW, ratio=RATIO, scale=0.5,
        )[0]  # fmt: skip

    count = 2 if kind == "swa" else 3
    compare(run, operands[:count], bad[:count], bad[0], poison)


@MODES
@POISONS
@POISONED
def test_indexer(document, poison, invariant):
    ops, draw = Ops(batch_invariant=invariant), Draw("indexer")
    bad = [SEGMENTS.document == document, SEGMENTS.document == document, owners(RATIO) == document]
    operands = [
        draw.normal(len(bad[0]), HEADS, WIDTH),
        draw.normal(len(bad[1]), HEADS),
        draw.normal(len(bad[2]), WIDTH),
    ]

    def scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        found = ops.indexer_scores(q, held(keys, entry_rows(RATIO)), weights, SEGMENTS, RATIO)
        return found.masked_fill(found == -torch.inf, 0.0)

    def selection(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        return ops.indexer_select(q, held(keys, entry_rows(RATIO)), weights, 3, SEGMENTS, RATIO)[~bad[0]]

    compare(scores, operands, bad, bad[0], poison)
    spoilt = [poison_rows(x, b, poison) for x, b in zip(operands, bad, strict=True)]
    assert torch.equal(selection(*spoilt), selection(*operands))


@MODES
@POISONS
@POISONED
def test_compressor_windows(document, poison, invariant):
    """Overlapping windows over packed tails: first windows and open ones have absent slots."""
    ops, draw = Ops(batch_invariant=invariant), Draw("windows")
    owner, number, complete = SEGMENTS.groups(RATIO)
    token = (number[:, None] - 1) * RATIO + torch.arange(2 * RATIO)

    def run(u: Tensor, v: Tensor) -> Tensor:
        values, gates = held(u, tail_rows(RATIO)), held(v, tail_rows(RATIO))
        row, present = values.locate(owner[:, None], token)
        slots = torch.where(present, row, -1)
        return ops.compress_pool(values.data, gates.data, torch.zeros(2 * RATIO, WIDTH), slots)[0][complete]

    bad = owners(1) == document
    operands = [draw.normal(len(bad), WIDTH) for _ in range(2)]
    compare(run, operands, [bad, bad], owner[complete] == document, poison)


@POISONS
@pytest.mark.parametrize("name", [name for name in ROW_OPS if name != "compress_pool"])
def test_rows(name, poison):
    """Operators without documents: every third row is poisoned. Indices and rotary tables are given, not poisoned."""
    run, operands = ROW_OPS[name](Draw(name), 24, torch.float32)
    count = 1 if "rotary" in name else sum(x.is_floating_point() for x in operands)
    bad = torch.arange(ROWS) % 3 == 0
    compare(lambda *x: run(*x, *operands[count:]), operands[:count], [bad] * count, bad, poison)
