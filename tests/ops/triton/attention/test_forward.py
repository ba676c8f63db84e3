"""Forward of attention against the definition in float64 on the same bfloat16 inputs, every buffer poisoned."""

import pytest
import torch

from tests.ops.triton.attention.calls import Call
from undertow.ops.triton.attention import forward as module
from undertow.ops.triton.attention.geometry import Slab, sight


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What is read without having been written shows."""

    def empty(*shape, dtype, device):
        size = shape[0] if isinstance(shape[0], tuple) else shape
        return torch.full(size, float("nan") if dtype.is_floating_point else 1 << 30, dtype=dtype, device=device)

    monkeypatch.setattr(module.torch, "empty", empty)


def run(call):
    """Output, log-sum-exp and choice of the kernels."""
    return module.forward(
        call.q, call.window, call.entries, call.selected, call.sink, call.segments,
        window_size=call.window_size, ratio=call.ratio, scale=call.scale,
    )  # fmt: skip


def check(call, forms):
    """`forms` are those of the choice: none, bits or gather."""
    wanted, wanted_lse, _ = call.reference()
    o, lse, chosen = run(call)
    assert o.shape == wanted.shape and o.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert (o.double() - wanted).norm() <= 3e-3 * wanted.norm()
    assert (lse.double() - wanted_lse).abs().max() <= 1e-4
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
    check(Call(lengths, device=device), [None])


@pytest.mark.parametrize("window", [1, 16, 17, 128])
def test_windows_of_any_size(window, device):
    check(Call((37, 3), window=window, heads=16, device=device), [None])


@pytest.mark.parametrize("lengths", LENGTHS)
def test_few_entries_beside_the_window(lengths, device):
    check(Call(lengths, ratio=4, device=device), [None])


@pytest.mark.parametrize(("heads", "width"), [(64, 64), (128, 64), (32, 128), (16, 192)])
def test_heads_and_widths(heads, width, device):
    check(Call((5, 2), heads=heads, width=width, ratio=2, device=device), [None])


@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_visible_entry_in_the_dense_form(lengths, device, form):
    form("dense")
    check(Call(lengths, ratio=1, device=device), [None])


@pytest.mark.parametrize(("keep", "heads"), [(1, 32), (6, 128), (30, 8)])
def test_a_selection_in_the_dense_form(keep, heads, device, form):
    form("dense")
    check(Call((13, 1, 9), ratio=1, heads=heads, keep=keep, device=device), ["bits"])


@pytest.mark.parametrize("keep", [1, 6])
def test_a_selection_in_the_gather_form(keep, device, form):
    form("gather")
    check(Call((7, 1, 4), ratio=1, heads=16, keep=keep, device=device), ["gather"])


@pytest.mark.parametrize(("kind", "forms"), [("dense", ["bits"] * 3), ("gather", ["gather"] * 3)])
def test_slabs_follow_each_other(kind, forms, device, form):
    form(kind, tokens=16 if kind == "dense" else 4)
    lengths = (9, 30) if kind == "dense" else (7, 4)
    check(Call(lengths, ratio=1, heads=16, keep=5, device=device), forms)


def test_a_slab_begins_behind_the_first_column(device, form):
    form("dense", tokens=144)
    check(Call((144, 20), ratio=1, window=4, device=device), [None] * 2)


def test_slabs_of_two_forms(device, monkeypatch):
    slabs = Slab(0, 16, "near"), Slab(16, 40, "dense", 0, 128)
    monkeypatch.setattr(module, "slabs", lambda *_: slabs)
    check(Call((10, 30), ratio=1, device=device), [None] * 2)


def test_what_the_geometry_chooses(device):
    check(Call((12, 4), ratio=1, heads=16, keep=12, device=device), ["bits"])
    check(Call((8,), ratio=1, heads=16, keep=1, device=device), ["gather"])
    check(Call((40,), ratio=1, device=device), [None])


def test_no_entry_is_made(device):
    check(Call((3, 2), ratio=4, device=device), [None])
    check(Call((3, 2), ratio=4, keep=2, device=device), [None])


@pytest.mark.parametrize("kind", ["near", "dense", "bits", "gather"])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_any_finite_scores_and_sinks(kind, scale, device, form):
    """Scores of up to 1e4, and entries that score far above the window, far below it, or both in one row."""
    if kind != "near":
        form("gather" if kind == "gather" else "dense")
    call = Call((10, 6), ratio=2, heads=16, keep=None if kind in ("near", "dense") else 4, device=device)
    call.q *= scale
    call.entries *= torch.tensor([0.001, 1.0, 4.0])[torch.arange(len(call.entries)) % 3, None].bfloat16().to(device)
    call.sink[:6] = torch.tensor([20.0, -20.0, 1e4, -1e4, 200.0, -200.0])
    wanted, wanted_lse, _ = call.reference()
    o, lse, _ = run(call)
    o = o.double()
    assert (o - wanted).norm() <= 3e-3 * wanted.norm()
    # A row of one key is rounded twice, by 2^-9 at most.
    assert ((o - wanted).norm(dim=-1) <= 6e-3 * wanted.norm(dim=-1) + 1e-30).all()
    assert ((lse.double() - wanted_lse).abs() <= 1e-4 + 1e-6 * wanted_lse.abs()).all()


def test_tiles_of_entries_each_far_above_the_last(device, form):
    form("dense", tokens=256)
    call = Call((144,), ratio=1, window=4, device=device)
    call.q[:128] = 0
    call.entries.copy_(call.q[143, 0] * torch.linspace(0, 60, 144, device=device)[:, None])
    check(call, [None])


def test_a_number_that_is_none_stays_with_its_token(device):
    call = Call((20, 12), ratio=2, device=device)
    call.q[7, 3, 5] = float("nan")
    wanted, wanted_lse, _ = call.reference()
    o, lse, _ = run(call)
    assert torch.equal(o.isnan(), wanted.isnan()) and torch.equal(lse.isnan(), wanted_lse.isnan())
    assert int(lse.isnan().sum()) == 1
