"""Selections as bits and as rows, against a set for each token."""

import pytest
import torch

from undertow.ops.segments import Segments
from undertow.ops.triton.attention.geometry import Slab, sight
from undertow.ops.triton.attention.selection import chosen, chosen_rows


def picks(segments, ratio, keep, seed):
    """Distinct numbers in any order among holes and numbers that are not visible, and what of them counts."""
    draw = torch.Generator().manual_seed(seed)
    selected = torch.full((segments.tokens, keep), -1, dtype=torch.int64)
    counted = []
    view = sight(segments, ratio)
    low, high = view.seen
    for token in range(segments.tokens):
        seen = int(high[token] - low[token])
        some = torch.randperm(seen + 5, generator=draw)[: max(keep - 1, 0)]
        place = torch.randperm(keep, generator=draw)[: len(some)].sort().values
        selected[token, place] = some
        counted.append([int(low[token]) + n for n in some.tolist() if n < seen])
    return selected, counted


@pytest.mark.parametrize("keep", [1, 7, 130])
@pytest.mark.parametrize("lengths", [(40,), (3, 90, 1, 60)])
def test_bits_are_the_entries_that_count(lengths, keep, device):
    segments = Segments.from_lengths(lengths, device=device)
    selected, counted = picks(segments, 1, keep, seed=keep)
    view = sight(segments, 1)
    for slab in (Slab(0, 20, "dense", 0, 256), Slab(segments.tokens - 20, segments.tokens, "dense", 128, 128)):
        bits = chosen(selected.to(device), view, slab).cpu()
        assert bits.shape == (slab.tokens, slab.columns // 32) and bits.dtype == torch.int32
        found = (bits[..., None] >> torch.arange(32)) & 1
        for row, token in zip(found.flatten(1), range(slab.start, slab.stop), strict=True):
            inside = [n - slab.column for n in counted[token] if 0 <= n - slab.column < slab.columns]
            assert row.nonzero().flatten().tolist() == sorted(inside)


def test_bits_of_more_columns_than_a_program_takes(device):
    segments = Segments.from_lengths([2400], device=device)
    selected = torch.full((2400, 3), -1, dtype=torch.int64, device=device)
    selected[2399] = torch.tensor([1100, 31, 1025])
    bits = chosen(selected, sight(segments, 2), Slab(2398, 2400, "dense", 0, 1280)).cpu()
    assert bits[0].eq(0).all()
    assert {int(i): int(w) for i, w in enumerate(bits[1]) if w} == {0: -(1 << 31), 32: 2, 34: 1 << 12}


@pytest.mark.parametrize("keep", [0, 1, 7, 128, 130])
def test_rows_are_those_that_count_in_their_order(keep, device):
    segments = Segments.from_lengths([3, 100, 1, 60], device=device)
    selected, counted = picks(segments, 1, keep, seed=keep)
    rows, counts = chosen(selected.to(device), sight(segments, 1), Slab(96, 164, "gather", 0, 256))
    width = max(-(-keep // 128), 1) * 128
    assert rows.shape == (68, width) and rows.dtype == counts.dtype == torch.int32
    for row, count, want in zip(rows.tolist(), counts.tolist(), counted[96:], strict=True):
        assert count == len(want) and row == want + [~(want or [0])[0]] * (width - count)


def test_rows_are_each_there_once(device):
    """In order of first mention; what is hidden, or beyond an int32, is not there."""
    selected = torch.tensor([[3, 1, 3, -1, 1, 9, 0], [0, 1, 1, 2, -1, 2, 2], [0, 1, 2, 3, 4, 5, 6]], device=device)
    selected[1, 4], selected[2, 6] = (1 << 32) + 3, -(1 << 32)
    low = torch.tensor([10, 20, 30], dtype=torch.int32, device=device)
    rows, counts = chosen_rows(selected, low, low + 5)
    assert counts.tolist() == [3, 3, 5] and rows.shape == (3, 128) and rows[0, 5:].eq(~13).all()
    assert rows[:, :5].tolist() == [[13, 11, 10, ~13, ~13], [20, 21, 22, ~20, ~20], [30, 31, 32, 33, 34]]


def test_nothing_is_chosen_without_a_selection(device):
    view = sight(Segments.from_lengths([40], device=device), 2)
    assert chosen(None, view, Slab(0, 40, "dense", 0, 128)) is None
    empty = torch.empty(40, 0, dtype=torch.int64, device=device)
    assert chosen(empty, view, Slab(0, 40, "dense", 0, 128)).eq(0).all()
