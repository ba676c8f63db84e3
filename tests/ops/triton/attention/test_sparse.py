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


def test_what_is_served():
    for heads in (8, 16, 32, 64, 128):
        q, window, entries, segments = operands(heads=heads, width=512)
        assert refusal(q, window, entries, segments, window_size=128) is None
        assert refusal(q, window, None, segments, window_size=128) is None
