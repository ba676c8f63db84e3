"""Forward of attention against the definition in float64 on the same bfloat16 inputs, every buffer poisoned."""

import pytest
import torch

from undertow.ops.reference.attention import sparse_attention
from undertow.ops.segments import Rows, Segments, entry_rows, window_rows
from undertow.ops.triton.attention import forward as module
from undertow.ops.triton.attention.geometry import Slab, sight


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What is read without having been written shows."""

    def empty(*size, dtype, device):
        return torch.full(size, float("nan") if dtype.is_floating_point else 1 << 30, dtype=dtype, device=device)

    monkeypatch.setattr(module, "empty", lambda *s, **k: empty(*(s[0] if not isinstance(s[0], int) else s), **k))


class Case:
    """Inputs of a call; `keep` entries are selected at random, some of them not visible, or all without it."""

    def __init__(self, lengths, *, heads=8, width=64, window=8, ratio=0, keep=None, seed=0, device="cpu"):
        draw = torch.Generator().manual_seed(seed)
        self.segments, self.ratio, self.window_size = Segments.from_lengths(lengths), ratio, window
        tokens = sum(lengths)
        made = sum(n // ratio for n in lengths) if ratio else 0

        def normal(*shape):
            return torch.randn(*shape, generator=draw)

        self.q, self.window = normal(tokens, heads, width).bfloat16(), normal(tokens, width).bfloat16()
        self.entries = normal(made, width).bfloat16() if ratio else None
        self.sink, self.scale = normal(heads), width**-0.5
        self.selected = None
        if keep is not None:
            most = max(n // ratio for n in lengths)
            order = torch.rand(tokens, most + 3, generator=draw).argsort(1)[:, :keep]
            self.selected = torch.where(torch.rand(order.shape, generator=draw) < 0.2, -1, order)
        self.device = device

    def reference(self):
        layout = self.segments.layout
        window = Rows(self.window.double(), layout(window_rows(self.window_size)))
        entries = None if self.entries is None else Rows(self.entries.double(), layout(entry_rows(self.ratio)))
        return sparse_attention(
            self.q.double(), window, entries, self.selected, self.sink.double(), self.segments,
            window_size=self.window_size, ratio=self.ratio, scale=self.scale,
        )  # fmt: skip

    def run(self):
        inputs = (self.q, self.window, self.entries, self.selected, self.sink)
        moved = [x if x is None else x.to(self.device) for x in inputs]
        segments = Segments.from_lengths(self.segments.new, device=self.device)
        return module.forward(*moved, segments, window_size=self.window_size, ratio=self.ratio, scale=self.scale)

    def check(self, forms):
        wanted, lse = self.reference()
        o, got, chosen = self.run()
        o, got = o.cpu().double(), got.cpu().double()
        assert o.shape == wanted.shape and got.dtype == torch.float64
        assert (o - wanted).norm() <= 3e-3 * wanted.norm()
        assert (got - lse).abs().max() <= 1e-4
        kinds = [None if c is None else "gather" if isinstance(c, tuple) else "bits" for c in chosen]
        assert kinds == forms, kinds


@pytest.fixture
def form(monkeypatch):
    """Makes every slab one of a form, of at most so many tokens."""

    def set(form, tokens=128):
        def slabs(segments, ratio, heads, keep):
            high = sight(segments, ratio).seen[1]
            found = []
            for start in range(0, segments.tokens, tokens):
                stop = min(start + tokens, segments.tokens)
                low = int(sight(segments, ratio).seen[0][start]) // 128 * 128
                found.append(Slab(start, stop, form, low, -(-(int(high[stop - 1]) - low) // 128) * 128))
            return tuple(found)

        monkeypatch.setattr(module, "slabs", slabs)

    return set


LENGTHS = [(1,), (40,), (5, 0, 3, 16, 20)]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_window_alone(lengths, device):
    Case(lengths, device=device).check([None])


@pytest.mark.parametrize("window", [1, 16, 17, 128])
def test_windows_of_any_size(window, device):
    Case((37, 3), window=window, heads=16, device=device).check([None])


@pytest.mark.parametrize("lengths", LENGTHS)
def test_few_entries_beside_the_window(lengths, device):
    Case(lengths, ratio=4, device=device).check([None])


@pytest.mark.parametrize(("heads", "width"), [(64, 64), (128, 64), (32, 128), (16, 192)])
def test_heads_and_widths(heads, width, device):
    Case((5, 2), heads=heads, width=width, ratio=2, device=device).check([None])


@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_visible_entry_in_the_dense_form(lengths, device, form):
    form("dense")
    Case(lengths, ratio=1, device=device).check([None])


@pytest.mark.parametrize(("keep", "heads"), [(1, 32), (6, 128), (30, 8)])
def test_a_selection_in_the_dense_form(keep, heads, device, form):
    form("dense")
    Case((13, 1, 9), ratio=1, heads=heads, keep=keep, device=device).check(["bits"])


@pytest.mark.parametrize("keep", [1, 6])
def test_a_selection_in_the_gather_form(keep, device, form):
    form("gather")
    Case((7, 1, 4), ratio=1, heads=16, keep=keep, device=device).check(["gather"])


@pytest.mark.parametrize(("kind", "forms"), [("dense", ["bits"] * 3), ("gather", ["gather"] * 3)])
def test_slabs_follow_each_other(kind, forms, device, form):
    form(kind, tokens=16 if kind == "dense" else 4)
    lengths = (9, 30) if kind == "dense" else (7, 4)
    Case(lengths, ratio=1, heads=16, keep=5, device=device).check(forms)


def test_a_slab_begins_behind_the_first_column(device, form):
    form("dense", tokens=144)
    Case((144, 20), ratio=1, window=4, device=device).check([None] * 2)


def test_slabs_of_two_forms(device, monkeypatch):
    slabs = Slab(0, 16, "near"), Slab(16, 40, "dense", 0, 128)
    monkeypatch.setattr(module, "slabs", lambda *_: slabs)
    Case((10, 30), ratio=1, device=device).check([None] * 2)


def test_what_the_geometry_chooses(device):
    Case((12, 4), ratio=1, heads=16, keep=12, device=device).check(["bits"])
    Case((8,), ratio=1, heads=16, keep=1, device=device).check(["gather"])
    Case((40,), ratio=1, device=device).check([None])


def test_no_entry_is_made(device):
    Case((3, 2), ratio=4, device=device).check([None])
    Case((3, 2), ratio=4, keep=2, device=device).check([None])


@pytest.mark.parametrize("kind", ["near", "dense", "bits", "gather"])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_any_finite_scores_and_sinks(kind, scale, device, form):
    """Scores of up to 1e4, and entries that score far above the window, far below it, or both in one row."""
    if kind != "near":
        form("gather" if kind == "gather" else "dense")
    case = Case((10, 6), ratio=2, heads=16, keep=None if kind in ("near", "dense") else 4, device=device)
    case.q *= scale
    case.entries *= torch.tensor([0.001, 1.0, 4.0])[torch.arange(len(case.entries)) % 3, None].bfloat16()
    case.sink[:6] = torch.tensor([20.0, -20.0, 1e4, -1e4, 200.0, -200.0])
    wanted, lse = case.reference()
    o, got, _ = case.run()
    o = o.cpu().double()
    assert (o - wanted).norm() <= 3e-3 * wanted.norm()
    # A row of one key is rounded twice, by 2^-9 at most.
    assert ((o - wanted).norm(dim=-1) <= 6e-3 * wanted.norm(dim=-1) + 1e-30).all()
    assert ((got.cpu().double() - lse).abs() <= 1e-4 + 1e-6 * lse.abs()).all()


def test_tiles_of_entries_each_far_above_the_last(device, form):
    form("dense", tokens=256)
    case = Case((144,), ratio=1, window=4, device=device)
    case.q[:128] = 0
    case.entries.copy_(case.q[143, 0] * torch.linspace(0, 60, 144)[:, None])
    case.check([None])


def test_a_number_that_is_none_stays_with_its_token(device):
    case = Case((20, 12), ratio=2, device=device)
    case.q[7, 3, 5] = float("nan")
    wanted, lse = case.reference()
    o, got, _ = case.run()
    assert torch.equal(o.cpu().isnan(), wanted.isnan()) and torch.equal(got.cpu().isnan(), lse.isnan())
    assert int(got.isnan().sum()) == 1
