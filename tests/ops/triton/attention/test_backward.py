"""Gradients of attention against the definition in float64 on the same bfloat16 inputs, every buffer poisoned."""

from itertools import pairwise

import pytest
import torch

from tests.ops.triton.attention.calls import Call
from undertow.ops.triton.attention import backward as module
from undertow.ops.triton.attention.geometry import Slab, sight
from undertow.ops.triton.attention.selection import chosen

TOLERANCE = 3e-3


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What is read without having been written shows."""

    def empty(*shape, dtype, device):
        size = shape[0] if isinstance(shape[0], tuple) else shape
        return torch.full(size, float("nan") if dtype.is_floating_point else 1 << 30, dtype=dtype, device=device)

    monkeypatch.setattr(module.torch, "empty", empty)


def cut(call, form, edges):
    """Slabs of one form between the given tokens."""
    view = sight(call.segments, call.ratio)
    low, high = view.seen.tolist()
    found = []
    for start, stop in pairwise(edges):
        first = low[start] // 128 * 128
        found.append(Slab(start, stop, form, first, -(-(high[stop - 1] - first) // 128) * 128))
    return tuple(found)


def gradients(call, monkeypatch, form=None, edges=None, deterministic=False):
    """Of the kernels, in slabs of one form or in those that the geometry chooses, from the definition's o and lse."""
    o, lse, wanted = call.reference()
    heads, keep = call.q.shape[1], None if call.selected is None else call.selected.shape[1]
    held = call.entries is not None and len(call.entries) > 0
    if form is None:
        slabs = module.slabs(call.segments, call.ratio if held else 0, heads, keep if held else None)
    else:
        slabs = cut(call, form, edges or (0, call.segments.tokens))
        monkeypatch.setattr(module, "slabs", lambda *_: slabs)
    picks = tuple(chosen(call.selected, sight(call.segments, call.ratio), slab) for slab in slabs)
    near = all(slab.form == "near" for slab in slabs)
    found = module.backward(
        call.q, call.window, call.entries, call.sink, None if near else o.bfloat16(), lse.float(), call.do, picks,
        call.segments, window_size=call.window_size, ratio=call.ratio, scale=call.scale, keep=keep,
        deterministic=deterministic,
    )  # fmt: skip
    return [x for x in found if x is not None], wanted


def check(call, monkeypatch, form=None, edges=None, deterministic=False):
    errors = call.errors(*gradients(call, monkeypatch, form, edges, deterministic))
    assert max(errors.values()) <= TOLERANCE, errors


LENGTHS = [(1,), (40,), (17, 1, 30), (5, 0, 3, 16, 20)]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_window_alone(lengths, device, monkeypatch):
    check(Call(lengths, device=device), monkeypatch)


@pytest.mark.parametrize("window", [1, 17, 33, 128])
def test_windows_of_any_size(window, device, monkeypatch):
    check(Call((33, 6), window=window, device=device), monkeypatch)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_few_entries_beside_the_window(lengths, device, monkeypatch):
    check(Call(lengths, ratio=4, device=device), monkeypatch)


@pytest.mark.parametrize(("heads", "width"), [(64, 64), (128, 64), (32, 128), (16, 192)])
def test_heads_and_widths(heads, width, device, monkeypatch):
    check(Call((5, 4), heads=heads, width=width, ratio=2, device=device), monkeypatch)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_visible_entry_in_the_dense_form(lengths, device, monkeypatch):
    check(Call(lengths, ratio=1, device=device), monkeypatch, "dense")


@pytest.mark.parametrize(("lengths", "heads", "keep"), [((17, 1, 12), 8, 6), ((9, 4), 64, 3), ((5,), 128, 2)])
def test_a_selection_in_the_dense_form(lengths, heads, keep, device, monkeypatch):
    check(Call(lengths, ratio=2, heads=heads, keep=keep, device=device), monkeypatch, "dense")


@pytest.mark.parametrize(
    ("lengths", "heads", "keep", "deterministic"),
    [
        ((15, 1, 8), 8, 6, False),
        ((15, 1, 8), 8, 6, True),
        ((20,), 16, 1, False),
        ((12,), 32, 20, True),
        ((5,), 64, 3, False),
        ((3,), 128, 2, True),
    ],
)
def test_a_selection_in_the_gather_form(lengths, heads, keep, deterministic, device, monkeypatch):
    call = Call(lengths, ratio=1, heads=heads, keep=keep, device=device)
    check(call, monkeypatch, "gather", deterministic=deterministic)


@pytest.mark.parametrize("form", ["near", "dense", "gather"])
def test_slabs_follow_each_other(form, device, monkeypatch):
    call = Call((9, 13), ratio=1, heads=16, window=20, keep=None if form == "near" else 5, device=device)
    check(call, monkeypatch, form, (0, 16, 22))


def test_forms_follow_each_other(device, monkeypatch):
    call = Call((9, 27), ratio=1, heads=8, keep=3, device=device)
    slabs = (*cut(call, "dense", (0, 16)), *cut(call, "gather", (16, 32)), *cut(call, "dense", (32, 36)))
    monkeypatch.setattr(module, "slabs", lambda *_: slabs)
    check(call, monkeypatch)


def test_a_slab_begins_behind_the_first_column(device, monkeypatch):
    call = Call((136, 8), ratio=1, window=4, device=device)
    check(call, monkeypatch, "dense", (0, 128, 144))


def test_no_entry_is_made(device, monkeypatch):
    check(Call((3, 2), ratio=4, device=device), monkeypatch)
    check(Call((3, 2), ratio=4, keep=2, device=device), monkeypatch)


def test_nothing_is_selected(device, monkeypatch):
    call = Call((12,), ratio=2, keep=2, window=8, device=device)
    call.selected.fill_(-1)
    for form in ("dense", "gather"):
        found, wanted = gradients(call, monkeypatch, form)
        assert max(call.errors(found, wanted).values()) <= TOLERANCE
        assert not found[2].any()


@pytest.mark.parametrize(
    ("sink", "form"), [(-20.0, "near"), (20.0, "near"), (-20.0, "dense"), (20.0, "dense"), (1e4, "dense")]
)
def test_sinks_that_weigh_nothing_or_all(sink, form, device, monkeypatch):
    call = Call((12,), ratio=2, device=device)
    call.sink.fill_(sink)
    check(call, monkeypatch, form)


@pytest.mark.parametrize("size", [3.0, 20.0, 300.0])
@pytest.mark.parametrize(("form", "heads"), [("near", 8), ("dense", 16), ("dense", 128), ("gather", 16), ("gather", 8)])
def test_scores_of_any_size(form, heads, size, device, monkeypatch):
    """Where one key has nearly all the weight, the rounding of o takes most of dS, if it is not given back."""
    keep = None if form == "near" else 3
    call = Call((20 if heads < 64 else 6, 7), ratio=2, heads=heads, keep=keep, size=size, window=16, device=device)
    check(call, monkeypatch, form)


def test_a_log_sum_exp_that_float32_rounds_much(device, monkeypatch):
    check(Call((20, 3), ratio=2, heads=16, size=1e4, device=device), monkeypatch, "near")


@pytest.mark.parametrize("form", ["dense", "gather"])
def test_rows_are_mended_one_by_one(form, device, monkeypatch):
    """Some tokens have large scores, so that groups of rows, and pieces of a slab, have some that are mended."""
    call = Call((70,), ratio=1, heads=16, keep=3, window=16, device=device)
    call.q[11:13] *= 30
    call.q[67] *= 30
    check(call, monkeypatch, form, (0, 48, 70))


def test_slabs_that_are_mended_follow_each_other(device, monkeypatch):
    call = Call((40,), ratio=1, heads=16, keep=3, size=30.0, window=16, device=device)
    slabs = (*cut(call, "dense", (0, 16)), *cut(call, "gather", (16, 32)), *cut(call, "dense", (32, 40)))
    monkeypatch.setattr(module, "slabs", lambda *_: slabs)
    check(call, monkeypatch)


@pytest.fixture
def backwards(device, monkeypatch):
    """Makes the programs of every launch run in the opposite order from then on; on a GPU they run in any order."""

    def turn():
        if device != "cpu":
            return
        from triton.runtime.interpreter import interpreter_builder as builder

        place = builder.set_grid_idx
        monkeypatch.setattr(
            builder, "set_grid_idx", lambda *at: place(*(n - 1 - i for n, i in zip(builder.grid_dim, at, strict=True)))
        )

    return turn


def summed(call, monkeypatch, form, deterministic):
    """Gradients, that of entries in float32, as it is summed."""
    made, zeros = [], torch.zeros
    with monkeypatch.context() as patch:
        patch.setattr(module.torch, "zeros", lambda *shape, **kind: made.append(zeros(*shape, **kind)) or made[-1])
        found, _ = gradients(call, patch, form, deterministic=deterministic)
    entries = [x for x in made if x.shape == call.entries.shape and x.dtype == torch.float32]
    assert torch.equal(entries[-1].bfloat16(), found[2])
    return found[0], found[1], entries[-1], found[3]


@pytest.mark.parametrize(
    ("form", "deterministic"), [("near", False), ("dense", False), ("gather", True)], ids=["near", "dense", "gather"]
)
def test_gradients_have_the_same_bits_in_any_order(form, deterministic, device, monkeypatch, backwards):
    """Of the gather form only if it is asked for."""
    call = Call((21, 7), ratio=1, keep=None if form == "near" else 5, device=device)
    first = summed(call, monkeypatch, form, deterministic)
    backwards()
    again = summed(call, monkeypatch, form, deterministic)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_atomics_add_in_the_order_in_which_programs_run(device, monkeypatch, backwards):
    """Without that, last bits of the entries' gradients differ, which is what the test above would see."""
    if device != "cpu":
        pytest.skip("a GPU chooses the order itself")
    call = Call((21, 7), ratio=1, keep=5, device=device)
    first = summed(call, monkeypatch, "gather", deterministic=False)
    backwards()
    again = summed(call, monkeypatch, "gather", deterministic=False)
    assert [torch.equal(a, b) for a, b in zip(first, again, strict=True)] == [True, True, False, True]
    assert (first[2] - again[2]).norm() <= 1e-6 * first[2].norm()


def test_inverted_index():
    rows = torch.tensor([[7, 5, -1], [5, 9, 7], [6, -1, -1]], dtype=torch.int32)
    starts, order = module.invert(rows, 5, 5)
    assert starts.tolist() == [0, 2, 3, 5, 5, 6]
    assert order[:6].tolist() == [1, 3, 6, 0, 5, 4]
    assert starts.dtype == order.dtype == torch.int32
