"""Sparse attention against a loop over queries: windows, entries, selections, sinks, packed documents with a past."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops import documents, naive
from tests.ops.compare import DTYPES, Draw, check, gradients, island, relative
from undertow.ops.reference import tiles
from undertow.ops.reference.attention import sparse_attention
from undertow.ops.segments import Rows, Segments, entry_rows, window_rows

HEADS, WIDTH = 3, 10
MODES = pytest.mark.parametrize("invariant", [False, True])
KINDS = ("swa", "csa", "hca")
RATIO = {"swa": 0, "csa": 4, "hca": 8}


class Case:
    """Operands of one call, with the whole history of every document."""

    def __init__(
        self, kind: str, window: int, new: Sequence[int], past: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float64, picks: int = 3, scale: float = 1.0, sink: float = 1.0,
    ):  # fmt: skip
        draw = Draw(kind, window, tuple(new), past)
        self.window, self.ratio, self.segments = window, RATIO[kind], Segments.from_lengths(new, past)
        totals = [p + n for p, n in zip(self.segments.past, new, strict=True)]
        self.q = draw.normal(sum(new), HEADS, WIDTH, dtype=dtype, scale=scale)
        self.latents = [draw.normal(n, WIDTH, dtype=dtype) for n in totals]
        self.entries = [draw.normal(n // self.ratio, WIDTH, dtype=dtype) for n in totals] if self.ratio else []
        self.sink = draw.normal(HEADS, dtype=island(dtype), scale=sink)
        self.selected = self._selection(draw, picks) if kind == "csa" else None

    def _selection(self, draw: Draw, picks: int) -> Tensor:
        """Distinct visible entries in any order, with fills anywhere."""
        rows = []
        for position in self.segments.positions.tolist():
            chosen = draw.order((position + 1) // self.ratio)[:picks].tolist()
            chosen = [c for c in chosen if draw.integers(4, 1).item()] if chosen else chosen
            chosen += [-1] * (picks - len(chosen))
            rows.append([chosen[i] for i in draw.order(picks).tolist()])
        return torch.tensor(rows, dtype=torch.int64).view(-1, picks)

    @property
    def inputs(self) -> list[Tensor]:
        return [self.q, self.sink, *self.latents, *self.entries]

    def _split(self, rows: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor] | None]:
        count = len(self.latents)
        return rows[:count], rows[count:] if self.ratio else None

    def op(self, invariant: bool):
        """The operator as a function of `inputs`."""

        def run(q: Tensor, sink: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor]:
            latents, entries = self._split(rows)
            window = documents.rows(latents, window_rows(self.window), self.segments)
            held = documents.rows(entries, entry_rows(self.ratio), self.segments) if entries is not None else None
            return sparse_attention(
                q, window, held, self.selected, sink, self.segments,
                window_size=self.window, ratio=self.ratio, scale=WIDTH**-0.5, invariant=invariant,
            )  # fmt: skip

        return run

    def definition(self, q: Tensor, sink: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor]:
        latents, entries = self._split(rows)
        return naive.sparse_attention(
            q, latents, entries, self.selected, sink, self.segments.new, self.segments.past,
            self.window, self.ratio, WIDTH**-0.5,
        )  # fmt: skip

    def check(self, invariant: bool, tolerance: float | None = None) -> None:
        check(self.op(invariant), self.definition, self.inputs, tolerance)


@MODES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 5, 128])
@pytest.mark.parametrize("length", [1, 7, 33, 150])
def test_one_document(length, window, kind, invariant):
    Case(kind, window, [length]).check(invariant, 1e-11)


@MODES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 5, 128])
@pytest.mark.parametrize(
    ("new", "past"),
    [
        ([3, 0, 40, 1, 17], None),
        ([1, 1, 1, 1], (0, 5, 31, 140)),
        ([6, 0, 35], (29, 12, 64)),
        ([2, 9], (7, 0)),
    ],
)
def test_packed_documents_with_a_past(new, past, window, kind, invariant):
    Case(kind, window, new, past).check(invariant, 1e-11)


@MODES
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("kind", KINDS)
def test_lower_precision(kind, dtype, invariant):
    Case(kind, 9, [50, 3, 70], (0, 11, 5), dtype).check(invariant, 5e-6 if dtype == torch.float32 else 1e-2)


@settings(max_examples=30)
@given(
    kind=st.sampled_from(KINDS),
    window=st.integers(1, 40),
    call=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 70)), min_size=1, max_size=4),
    invariant=st.booleans(),
)
def test_random_calls(kind, window, call, invariant):
    new, past = [n for n, _ in call], tuple(p for _, p in call)
    Case(kind, window, new, past, picks=2).check(invariant, 1e-10)


@MODES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sink", [-20.0, 20.0, -1e4, 1e4])
def test_sinks(sink, kind, invariant):
    case = Case(kind, 5, [21], dtype=torch.float32)
    case.sink = torch.full((HEADS,), sink)
    mine = [x.clone().requires_grad_() for x in case.inputs]
    out, lse = case.op(invariant)(*mine)
    want, want_lse = case.definition(*(x.double() for x in case.inputs))
    assert relative(out, want) < 5e-6
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    grads = gradients(out, mine)
    assert all(torch.isfinite(g).all() for g in grads)
    if abs(sink) == 1e4:
        assert (grads[1] == 0).all()


@MODES
@pytest.mark.parametrize("kind", KINDS)
def test_large_scores(kind, invariant):
    """One key takes all: scores of hundreds, of either sign."""
    case = Case(kind, 5, [37, 8], scale=300.0)
    case.check(invariant, 1e-10)
    case = Case(kind, 5, [37, 8], dtype=torch.float32, scale=300.0)
    mine = [x.clone().requires_grad_() for x in case.inputs]
    out, lse = case.op(invariant)(*mine)
    assert relative(out, case.definition(*(x.double() for x in case.inputs))[0]) < 1e-4
    assert all(torch.isfinite(x).all() for x in (out, lse, *gradients(out, mine)))


@MODES
def test_sink_takes_weight_and_gives_no_value(invariant):
    """Two equal keys of score 0 and a sink of 0: each a third."""
    segments = Segments.from_lengths([2])
    window = Rows(torch.tensor([[3.0, 0.0], [6.0, 0.0]]), segments.layout(window_rows(4)))
    out, lse = sparse_attention(
        torch.zeros(2, 1, 2), window, None, None, torch.zeros(1), segments,
        window_size=4, scale=1.0, invariant=invariant,
    )  # fmt: skip
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([1.5, 3.0]))
    torch.testing.assert_close(lse[:, 0], torch.log(torch.tensor([2.0, 3.0])))
    assert lse.dtype == torch.float32
    assert not lse.requires_grad


@MODES
def test_window_counts_the_query_itself(invariant):
    """A change of key `j` reaches queries `j` to `j + window - 1` and no others."""
    case = Case("swa", 5, [40], dtype=torch.float32)
    before = case.op(invariant)(*case.inputs)[0]
    case.latents[0][10] += 1.0
    changed = (case.op(invariant)(*case.inputs)[0] != before).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == list(range(10, 15))


@MODES
@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_an_entry_is_visible_to_the_query_that_completes_it(kind, invariant):
    case = Case(kind, 1, [40], dtype=torch.float32)
    case.selected = None
    before = case.op(invariant)(*case.inputs)[0]
    case.entries[0][2] += 1.0
    changed = (case.op(invariant)(*case.inputs)[0] != before).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == list(range(3 * RATIO[kind] - 1, 40))


@MODES
def test_selected_entries_of_the_future_are_not_seen(invariant):
    case = Case("csa", 5, [30])
    want = case.definition(*case.inputs)[0]
    future = (case.segments.positions + 1) // 4
    case.selected = torch.where(case.selected < 0, future[:, None] + torch.arange(3), case.selected)
    assert relative(case.op(invariant)(*case.inputs)[0], want) < 1e-12


@MODES
def test_selection_of_all_is_no_selection(invariant):
    case = Case("csa", 5, [50, 9])
    case.selected = None
    want = case.op(invariant)(*case.inputs)
    everything = torch.arange(12).expand(59, -1)
    case.selected = torch.where(everything < (case.segments.positions[:, None] + 1) // 4, everything, -1)
    got = case.op(invariant)(*case.inputs)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    case.selected = torch.full((59, 2), -1)
    nothing = Case("swa", 5, [50, 9])
    nothing.q, nothing.sink, nothing.latents = case.q, case.sink, case.latents
    assert relative(case.op(invariant)(*case.inputs)[0], nothing.op(invariant)(*nothing.inputs)[0]) < 1e-12


@MODES
@pytest.mark.parametrize("kind", KINDS)
def test_documents_do_not_see_each_other(kind, invariant):
    case = Case(kind, 128, [20, 0, 30], dtype=torch.float32)
    before = case.op(invariant)(*case.inputs)[0]
    case.latents[0] += 1.0
    for entries in case.entries[:1]:
        entries += 1.0
    case.q[:20] += 1.0
    after = case.op(invariant)(*case.inputs)[0]
    assert torch.equal(after[20:], before[20:])
    assert not torch.equal(after[:20], before[:20])


@MODES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("new", "past"), [([0, 0], (0, 9)), ([0], (0,))])
def test_no_queries(new, past, kind, invariant):
    case = Case(kind, 4, new, past)
    mine = [x.clone().requires_grad_() for x in case.inputs]
    out, lse = case.op(invariant)(*mine)
    assert (out.shape, lse.shape) == ((0, HEADS, WIDTH), (0, HEADS))
    assert all((g == 0).all() for g in gradients(out, mine))


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_blocks_change_nothing_but_rounding(kind, monkeypatch):
    case = Case(kind, 9, [150, 3, 70], (0, 60, 5))
    for budget in (1, 20000):
        monkeypatch.setattr(tiles, "_BUDGET", budget)
        case.check(False, 1e-11)


@MODES
def test_gradcheck(invariant):
    case = Case("csa", 3, [6, 2], (0, 7))
    inputs = [x.requires_grad_() for x in case.inputs]
    assert torch.autograd.gradcheck(lambda *x: case.op(invariant)(*x)[0], inputs, fast_mode=True)


@MODES
def test_expanded_upstream_gradient_and_strided_queries(invariant):
    case = Case("hca", 5, [20])
    case.q = torch.stack([case.q, case.q], -1)[..., 1]
    mine = [x.clone().requires_grad_() for x in case.inputs]
    mine[0] = case.q.detach().requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in case.inputs]
    got = torch.autograd.grad(case.op(invariant)(*mine)[0].sum(), mine)
    want = torch.autograd.grad(case.definition(*exact)[0].sum(), exact)
    assert all(relative(g, w) < 1e-11 for g, w in zip(got, want, strict=True))
