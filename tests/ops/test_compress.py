"""Compressor pooling: windows of both kinds, absent slots, and windows that stay open between calls."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops import documents, naive
from tests.ops.compare import Draw, check, gradients, relative, same_bits
from undertow.ops.reference.compress import Running, compress_pool
from undertow.ops.segments import Segments, tail_rows

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6}
MODES = pytest.mark.parametrize("invariant", [False, True])
TYPES = pytest.mark.parametrize("dtype", list(TOLERANCE))


def windows(tokens: int, ratio: int) -> Tensor:
    """Slots of the complete windows of one document without overlap."""
    return torch.arange(tokens // ratio * ratio).view(-1, ratio)


def overlapping(u: Tensor, v: Tensor, ape: Tensor, invariant: bool) -> Tensor:
    """CSA entries of one document: rows of the overlap half, then rows of the own half."""
    ratio, c, tokens = len(ape), u.shape[1] // 2, len(u)
    own = windows(tokens, ratio)
    before = torch.where(own < ratio, -1, own - ratio)
    u, v, ape = (torch.cat([x[:, :c], x[:, c:]]) for x in (u, v, ape))
    return compress_pool(u, v, ape, torch.cat([before, own + tokens], 1), invariant=invariant)[0]


@MODES
@TYPES
@pytest.mark.parametrize(("tokens", "ratio", "channels"), [(12, 4, 6), (21, 7, 5), (130, 128, 3), (2, 2, 1)])
def test_plain_windows(tokens, ratio, channels, dtype, invariant):
    draw = Draw(tokens, ratio)
    operands = [draw.normal(n, channels, dtype=dtype) for n in (tokens, tokens, ratio)]
    check(
        lambda u, v, ape: compress_pool(u, v, ape, windows(tokens, ratio), invariant=invariant)[0],
        naive.plain_entries,
        operands,
        TOLERANCE[dtype] * (1 if dtype == torch.float64 else 3),
    )


@MODES
@TYPES
@pytest.mark.parametrize("tokens", [4, 12, 23])
def test_overlapping_windows(tokens, dtype, invariant):
    draw = Draw(tokens)
    operands = [draw.normal(n, 10, dtype=dtype) for n in (tokens, tokens, 4)]
    check(
        lambda u, v, ape: overlapping(u, v, ape, invariant),
        naive.overlapping_entries,
        operands,
        TOLERANCE[dtype],
    )


def test_the_first_half_of_the_channels_goes_to_the_next_window():
    u, v, ape = torch.zeros(8, 2), torch.zeros(8, 2), torch.zeros(4, 2)
    u[:4, 0] = 8.0
    u[4:, 1] = 16.0
    assert overlapping(u, v, ape, False)[:, 0].tolist() == [0.0, 12.0]


@MODES
def test_absent_slots_have_weight_zero(invariant):
    """Row 0 stands in for absent slots: neither its size nor a NaN may show, in values or gradients."""
    draw = Draw("absent")
    u, v, ape = draw.normal(5, 3), draw.normal(5, 3), draw.normal(4, 3)
    slots = torch.tensor([[-1, 1, 2, -1], [3, -1, -1, -1]])
    for value in (1e30, float("inf"), float("nan")):
        u[0], v[0] = value, value
        leaves = [x.clone().requires_grad_() for x in (u, v, ape)]
        entry, _ = compress_pool(*leaves, slots, invariant=invariant)
        want = naive.pool([u[1], u[2]], [v[1] + ape[1], v[2] + ape[2]])
        torch.testing.assert_close(entry[0], want)
        torch.testing.assert_close(entry[1], u[3])
        grad_u, grad_v, grad_ape = gradients(entry, leaves)
        assert all(torch.isfinite(grad).all() for grad in (grad_u, grad_v, grad_ape))
        assert (grad_u[0] == 0).all()
        assert (grad_v[0] == 0).all()
        assert (grad_ape[3] == 0).all()


@MODES
@pytest.mark.parametrize("size", [30.0, 1e4])
def test_extreme_gates(size, invariant):
    draw = Draw("gates", size)
    u, v, ape = draw.normal(12, 5), draw.normal(12, 5, scale=size), draw.normal(4, 5)
    leaves = [x.clone().requires_grad_() for x in (u, v, ape)]
    entry, _ = compress_pool(*leaves, windows(12, 4), invariant=invariant)
    assert relative(entry, naive.plain_entries(u.double(), v.double(), ape.double())) < 1e-4
    assert all(torch.isfinite(g).all() for g in gradients(entry, leaves))


@MODES
def test_gradcheck(invariant):
    draw = Draw("gradcheck")
    leaves = [draw.normal(n, 2, dtype=torch.float64).requires_grad_() for n in (6, 6, 4)]
    slots = torch.tensor([[-1, -1, 0, 1], [0, 1, 4, 5], [5, 4, 3, 2]])
    assert torch.autograd.gradcheck(lambda u, v, a: compress_pool(u, v, a, slots, invariant=invariant)[0], leaves)


def in_pieces(u: Tensor, v: Tensor, ape: Tensor, pieces: list[int], invariant: bool) -> Tensor:
    """Entries of one document without overlap that arrives in `pieces`; the open window is carried as its state."""
    ratio, entries, start = len(ape), [u[:0]], 0
    state: Running | None = None
    for size in pieces:
        if size == 0:
            continue
        end = start + size
        first, last = start // ratio, -(-end // ratio)
        token = torch.arange(first * ratio, last * ratio).view(-1, ratio)
        slots = torch.where((token >= start) & (token < end), token - start, -1)
        carried = Running.empty(last - first, u.shape[1], u)
        if state is not None:
            carried = Running(*(torch.cat([s, e[1:]]) for s, e in zip(state, carried, strict=True)))
        entry, after = compress_pool(u[start:end], v[start:end], ape, slots, carried, invariant=invariant)
        complete = end // ratio - first
        entries.append(entry[:complete])
        state = Running(*(s[complete:] for s in after)) if end % ratio else None
        start = end
    return torch.cat(entries)


@settings(max_examples=40)
@given(
    pieces=st.lists(st.integers(0, 20), min_size=1, max_size=6),
    ratio=st.sampled_from([2, 8]),
    channels=st.sampled_from([3, 24]),
)
def test_a_carried_state_equals_the_whole(pieces, ratio, channels):
    tokens = sum(pieces)
    draw = Draw(tokens, ratio)
    u, v, ape = (draw.normal(n, channels) for n in (tokens, tokens, ratio))
    whole = compress_pool(u, v, ape, windows(tokens, ratio), invariant=True)[0]
    assert same_bits(in_pieces(u, v, ape, pieces, invariant=True), whole)
    assert relative(in_pieces(u, v, ape, pieces, invariant=False), whole) < 1e-6


@MODES
@pytest.mark.parametrize("size", [1e3, -1e3])
def test_a_carried_state_keeps_its_maximum(size, invariant):
    """A state of far larger or smaller gates than those that join it."""
    draw = Draw("maximum", size)
    u, v, ape = draw.normal(8, 3), draw.normal(8, 3), torch.zeros(8, 3)
    v[:5] += size
    whole = naive.plain_entries(u.double(), v.double(), ape.double())
    assert relative(in_pieces(u, v, ape, [5, 3], invariant), whole) < 1e-4


def from_tails(u: Sequence[Tensor], v: Sequence[Tensor], ape: Tensor, segments: Segments) -> Tensor:
    """CSA entries that a call completes, document after document, from the rows of open and previous groups."""
    ratio = len(ape)
    values, gates = (documents.rows(x, tail_rows(ratio), segments) for x in (u, v))
    document, number, complete = segments.groups(ratio)
    token = (number[:, None] - 1) * ratio + torch.arange(2 * ratio)
    row, held = values.locate(document[:, None], token)
    slots = torch.where(held, row, -1)
    slots[:, ratio:] = torch.where(slots[:, ratio:] < 0, -1, slots[:, ratio:] + len(values.data))
    c = ape.shape[1] // 2
    halves = (torch.cat([x[:, :c], x[:, c:]]) for x in (values.data, gates.data, ape))
    return compress_pool(*halves, slots, invariant=True)[0][complete]


@settings(max_examples=25)
@given(schedule=documents.schedules(largest=20))
def test_overlapping_windows_of_pieces_equal_the_whole(schedule):
    """Each call holds the open group and the one before it; entries come out with the same bits."""
    draw, ratio = Draw(tuple(schedule.lengths)), 4
    u, v = ([draw.normal(n, 12) for n in schedule.lengths] for _ in range(2))
    ape = draw.normal(ratio, 12)
    whole = from_tails(u, v, ape, schedule.whole)
    counts = [n // ratio for n in schedule.lengths]
    want = [naive.overlapping_entries(a.double(), b.double(), ape.double()) for a, b in zip(u, v, strict=True)]
    assert relative(whole, torch.cat(want)) < 3e-6
    by_document = whole.split(counts)
    for segments, _ in schedule.calls():
        ends = [p + n for p, n in zip(segments.past, segments.new, strict=True)]
        seen = ([x[:e] for x, e in zip(rows, ends, strict=True)] for rows in (u, v))
        part = from_tails(*seen, ape, segments)
        new = [x[p // ratio : e // ratio] for x, p, e in zip(by_document, segments.past, ends, strict=True)]
        assert same_bits(part, torch.cat(new))


@MODES
def test_no_gradient_flows_through_the_state(invariant):
    draw = Draw("state")
    leaves = [draw.normal(n, 3, dtype=torch.float64).requires_grad_() for n in (2, 2, 4)]
    _, state = compress_pool(*leaves, torch.tensor([[0, 1, -1, -1]]), invariant=invariant)
    assert not any(part.requires_grad for part in state)
    rest = [draw.normal(2, 3, dtype=torch.float64).requires_grad_() for _ in range(2)]
    ape = leaves[2].detach().clone().requires_grad_()
    entry, _ = compress_pool(*rest, ape, torch.tensor([[-1, -1, 0, 1]]), state, invariant=invariant)
    u, v = (torch.cat([a.detach(), b]) for a, b in zip(leaves[:2], rest, strict=True))
    fixed = torch.cat([leaves[2].detach()[:2], ape[2:]])
    want = naive.plain_entries(u, v, fixed)
    assert relative(entry, want) < 1e-12
    for got, exact in zip(gradients(entry, [*rest, ape]), gradients(want, [*rest, ape]), strict=True):
        assert relative(got, exact) < 1e-12


@MODES
def test_state_is_maximum_weight_sum_and_weighted_sum(invariant):
    u, v = torch.tensor([[2.0], [3.0]]), torch.tensor([[1.0], [1.0]])
    _, state = compress_pool(u, v, torch.zeros(3, 1), torch.tensor([[0, 1, -1], [-1, -1, -1]]), invariant=invariant)
    assert state.top.flatten().tolist() == [1.0, -torch.inf]
    assert state.weight.flatten().tolist() == [2.0, 0.0]
    assert state.value.flatten().tolist() == [5.0, 0.0]


@MODES
def test_no_windows(invariant):
    leaves = [torch.zeros(n, 3, requires_grad=True) for n in (0, 0, 4)]
    entry, state = compress_pool(*leaves, torch.zeros(0, 4, dtype=torch.int64), invariant=invariant)
    assert entry.shape == state.top.shape == (0, 3)
    assert [g.shape for g in gradients(entry, leaves)] == [(0, 3), (0, 3), (4, 3)]
