"""What tokens see, and the slabs that cover them."""

from itertools import pairwise

import pytest
import torch

from undertow.ops.segments import Segments
from undertow.ops.triton.attention.geometry import BLOCK, COLUMNS, NEAR, SPILL, old_rows, sight, slabs
from undertow.ops.triton.attention.sparse import HEADS
from undertow.ops.triton.attention.tiles import ROWS


def test_sight_of_packed_documents():
    segments = Segments.from_lengths([5, 0, 1, 4])
    view = sight(segments, 2)
    assert view.begin.tolist() == [0] * 5 + [5] + [6] * 4
    assert view.low.tolist() == [0] * 5 + [2] + [2] * 4
    assert view.high.tolist() == [0, 1, 1, 2, 2, 2, 2, 3, 3, 4]
    assert view.entries == 4 and view.begin.dtype == view.low.dtype == view.high.dtype == torch.int32
    assert torch.equal(view.seen, torch.stack((view.low, view.high)).long())
    assert sight(segments, 2) is view


def test_sight_without_entries():
    view = sight(Segments.from_lengths([3, 2]), 0)
    assert view.entries == 0 and view.low.tolist() == view.high.tolist() == [0] * 5


@pytest.mark.parametrize("lengths", [(1 << 20,), (128,) * 8192], ids=["one", "many"])
@pytest.mark.parametrize(("ratio", "keep"), [(0, None), (4, 128), (4, None), (128, None)])
def test_a_million_tokens_fit_a_grid(lengths, ratio, keep):
    """What lies along a second axis, which ends at 65,535: a slab's tokens, or quarters of its groups of rows."""
    segments = Segments.from_lengths(lengths)
    for heads in HEADS:
        for slab in slabs(segments, ratio, heads, keep):
            if slab.form != "near":
                assert (slab.tokens if slab.form == "gather" else 4 * -(-slab.tokens * heads // ROWS)) <= 65535


@pytest.mark.parametrize(("window", "rows"), [(1, 16), (17, 16), (18, 32), (33, 32), (64, 64), (100, 128), (128, 128)])
def test_rows_before_a_block(window, rows):
    assert old_rows(window) == rows


@pytest.mark.parametrize("lengths", [(4096,), (70, 3, 900, 1, 5000), (1,), (65536,), (40,) * 200])
@pytest.mark.parametrize(("ratio", "keep"), [(0, None), (4, 512), (4, 8), (128, None), (4, None)])
@pytest.mark.parametrize("heads", [8, 64, 128])
def test_slabs_cover_every_token_and_what_it_sees(lengths, ratio, keep, heads):
    segments = Segments.from_lengths(lengths)
    found = slabs(segments, ratio, heads, keep)
    low, high = sight(segments, ratio).seen
    assert [s.start for s in found] == [0, *(s.stop for s in found[:-1])] and found[-1].stop == segments.tokens
    for slab in found:
        assert slab.start % COLUMNS == 0 and slab.tokens > 0
        a, b = int(low[slab.start]), int(high[slab.stop - 1])
        if slab.form == "near":
            starts = torch.arange(slab.start, slab.stop, BLOCK)
            assert int((high[(starts + BLOCK - 1).clamp(max=slab.stop - 1)] - low[starts]).max()) <= NEAR
            continue
        assert slab.column % COLUMNS == slab.columns % COLUMNS == 0
        assert slab.column <= a and b <= slab.column + slab.columns
        if slab.form == "dense":
            assert slab.tokens * heads * slab.columns * 4 <= SPILL


@pytest.mark.parametrize(("heads", "tokens"), [(64, 64), (128, 32)])
def test_slabs_of_a_long_document_keep_no_more(heads, tokens):
    """Of all of one entry in four: 65,536 columns in the end."""
    planned = slabs(Segments.from_lengths([1 << 18]), 4, heads, None)
    assert {slab.form for slab in planned} == {"dense"} and planned[-1].columns == 1 << 16
    assert all(a.stop == b.start and b.start % BLOCK == 0 for a, b in pairwise(planned))
    assert max(slab.tokens * heads * slab.columns * 4 for slab in planned) <= SPILL == 3 << 29
    assert planned[-1].tokens == tokens


def test_forms_of_the_model_at_training_lengths():
    def forms(tokens, ratio, keep, heads=64):
        return {s.form for s in slabs(Segments.from_lengths([tokens]), ratio, heads, keep)}

    assert forms(65536, 0, None) == {"near"}
    assert forms(4096, 128, None) == {"near"} and forms(8192, 128, None) == {"near", "dense"}
    assert forms(4096, 4, 512) == {"dense"} and forms(4096, 4, 1024, 128) == {"dense"}
    assert forms(16384, 4, 512) == {"dense", "gather"}
    assert forms(16384, 4, 512, 8) == {"dense"}
    assert slabs(Segments.from_lengths([]), 4, 64, 512) == ()
