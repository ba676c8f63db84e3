"""Sparse attention by kernels as an operator: forward and backward against the definition, and what it refuses."""

import pytest
import torch

from tests.ops.triton.attention.calls import Call
from undertow.ops.segments import Rows, Segments, entry_rows, window_rows
from undertow.ops.triton.attention import geometry
from undertow.ops.triton.attention.sparse import refusal, sparse_attention


def check(call):
    o, lse, wanted = call.reference()
    got, found_lse, found = call.run(sparse_attention)
    assert got.dtype == torch.bfloat16 and found_lse.dtype == torch.float32
    assert (got.double() - o).norm() <= 3e-3 * o.norm()
    assert (found_lse - lse).abs().max() <= 1e-4
    assert [x.dtype for x in found] == [x.dtype for x in call.leaves]
    errors = call.errors(found, wanted)
    assert max(errors.values()) <= 3e-3, errors


@pytest.mark.parametrize(
    ("lengths", "settings"),
    [
        ((20, 3), {}),
        ((20, 3), {"ratio": 4}),
        ((30,), {"ratio": 1, "keep": 30}),
        ((24,), {"ratio": 1, "keep": 2, "heads": 16}),
        ((40,), {"ratio": 1}),
        ((3, 2), {"ratio": 4, "keep": 3}),
    ],
    ids=["window", "near", "dense", "gather", "dense without a selection", "no entry"],
)
def test_forward_and_backward(lengths, settings, device):
    check(Call(lengths, device=device, **settings))


@pytest.mark.parametrize("keep", [None, 40])
def test_slabs_of_one_block(keep, device, monkeypatch):
    """As of a document so long that nothing larger may be kept, with a window that reaches over several of them."""
    monkeypatch.setattr(geometry, "SPILL", 1)
    call = Call((40, 13), ratio=1, keep=keep, window=40, device=device)
    planned = geometry.slabs(call.segments, 1, 8, keep)
    assert [(slab.form, slab.start, slab.stop) for slab in planned] == [
        ("dense", a, min(a + 16, 53)) for a in range(0, 53, 16)
    ]
    check(call)


def test_rows_of_a_wider_matrix(device):
    call = Call((12,), ratio=4, device=device)
    call.q, call.window = (torch.cat((x, x), -1)[..., :64] for x in (call.q, call.window))
    check(call)


def off_by_one(x):
    """The same numbers, contiguous, at an address that is no multiple of 16 bytes."""
    room = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    room[1:] = x.flatten()
    found = room[1:].view(x.shape)
    assert found.is_contiguous() and found.data_ptr() % 16
    return found


@pytest.mark.parametrize("settings", [{"ratio": 4}, {"ratio": 1, "keep": 2, "heads": 16}], ids=["near", "gather"])
def test_rows_at_any_address(settings, device):
    call = Call((24,), device=device, **settings)
    call.q, call.do, call.window, call.entries = map(off_by_one, (call.q, call.do, call.window, call.entries))
    check(call)


def test_a_single_row_of_any_stride(device):
    """torch calls one row contiguous whatever its stride is, and that of a transposed column is one number."""
    call = Call((4,), ratio=4, device=device)
    call.entries = call.entries.flatten()[:, None].clone().T
    assert call.entries.stride() == (1, 1)
    check(call)


@pytest.mark.parametrize("heads", [8, 16])
def test_nothing_to_choose(heads, device):
    call = Call((24,), ratio=4, keep=0, heads=heads, device=device)
    assert not call.run(sparse_attention)[2][2].any()
    check(call)


@pytest.mark.parametrize("keep", [3, 40], ids=["gather", "dense"])
@pytest.mark.parametrize("ascending", [False, True])
def test_an_entry_chosen_twice_counts_once(keep, ascending, device):
    call = Call((40,), ratio=1, keep=keep, heads=16, device=device)
    forms = {slab.form for slab in geometry.slabs(call.segments, 1, 16, keep)}
    assert forms == {"gather" if keep == 3 else "dense"}
    call.selected[:, 0], call.selected[:, 1], call.selected[:, 2] = (5, 5, 7) if ascending else (2, 0, 2)
    check(call)


@pytest.mark.parametrize("keep", [3, 40], ids=["gather", "dense"])
def test_numbers_beyond_an_int32_are_of_no_entry(keep, device):
    call = Call((40,), ratio=1, keep=keep, heads=16, device=device)
    call.selected[:, 0], call.selected[:, 1] = (1 << 32) + 1, -(1 << 32) + 2
    check(call)


def test_a_document_is_not_spoilt_by_another_entrys_nan(device):
    """In the gather form, whose empty slots read some row too."""
    call = Call((16, 16), ratio=1, keep=3, heads=16, device=device)
    assert {slab.form for slab in geometry.slabs(call.segments, 1, 16, 3)} == {"gather"}
    call.selected[:, 0], call.selected[:, 2] = 0, -1
    whole = call.run(sparse_attention)
    call.entries[0] = torch.nan
    o, lse, (dq, *_) = call.run(sparse_attention)
    assert o[:16].isnan().any() and lse[:16].isnan().any()
    for found, want in ((o, whole[0]), (lse, whole[1]), (dq, whole[2][0])):
        assert torch.equal(found[16:], want[16:])


def test_a_call_without_tokens(device):
    o, lse, found = Call((0,), device=device).run(sparse_attention)
    assert o.shape == (0, 8, 64) and lse.shape == (0, 8)
    assert [x.shape for x in found] == [(0, 8, 64), (0, 64), (8,)] and not found[2].any()


def test_the_output_is_kept_only_where_it_is_read(device):
    def kept(**settings):
        call, found = Call((20,), ratio=1, device=device, **settings), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: found.append(x) or x, lambda x: x):
            call.run(sparse_attention)
        return sum(x.shape == call.q.shape for x in found)

    assert kept() == 1 and kept(keep=20) == 2


def operands(dtype=torch.bfloat16, heads=8, width=64, new=(5, 4), past=None):
    segments = Segments.from_lengths(new, past)
    rows = [sum(layout.kept) + sum(layout.added) for layout in map(segments.layout, (window_rows(8), entry_rows(4)))]
    q = torch.zeros(sum(new), heads, width, dtype=dtype)
    window, entries = (
        Rows(torch.zeros(n, width, dtype=dtype), segments.layout(kind))
        for n, kind in zip(rows, (window_rows(8), entry_rows(4)), strict=True)
    )
    return q, window, entries, segments


@pytest.mark.parametrize(
    ("settings", "options", "named"),
    [
        ({"dtype": torch.float32}, {}, "bfloat16, not float32"),
        ({"heads": 4}, {}, "heads, not 4"),
        ({"heads": 48}, {}, "heads, not 48"),
        ({"heads": 256}, {}, "heads, not 256"),
        ({"width": 96}, {}, "multiple of 64, not 96"),
        ({"past": (0, 3)}, {}, "one of these continues"),
        ({}, {"window_size": 256}, "windows of 1 to 128 tokens, not 256"),
        ({}, {"invariant": True}, "other documents"),
    ],
)
def test_refusals_name_the_value(settings, options, named):
    reason = refusal(*operands(**settings), **{"window_size": 8, **options})
    assert reason is not None and named in reason


def test_rows_of_a_pool_are_refused():
    q, window, entries, segments = operands()
    pool = Rows(torch.zeros(100, 64, dtype=torch.bfloat16), entries.layout)
    assert "pool" in (refusal(q, window, pool, segments, window_size=8) or "")
    pool = Rows(torch.zeros(100, 64, dtype=torch.bfloat16), window.layout)
    assert "pool" in (refusal(q, pool, None, segments, window_size=8) or "")


def test_more_numbers_than_an_int32_tells_are_refused():
    segments, wide = Segments.from_lengths([1 << 22]), torch.empty(1 << 22, 512, dtype=torch.bfloat16, device="meta")
    q, window = wide[:, None].expand(-1, 8, -1), Rows(wide, segments.layout(window_rows(8)))
    reason = refusal(q, window, Rows(wide, segments.layout(entry_rows(1))), segments, window_size=8)
    assert reason == "the kernels take entries of less than 2^31 numbers in all, not 2,147,483,648"


def test_what_is_served():
    for heads in (8, 16, 32, 64, 128):
        q, window, entries, segments = operands(heads=heads, width=512)
        assert refusal(q, window, entries, segments, window_size=128) is None
        assert refusal(q, window, None, segments, window_size=128) is None
