"""Attention kernels on a GPU against the definition in float32: many shapes, long documents, the same bits again."""

import random

import pytest
import torch

from tests.ops.triton.attention.calls import Call
from undertow.ops.triton.attention.geometry import sight, slabs
from undertow.ops.triton.attention.sparse import sparse_attention

pytestmark = pytest.mark.gpu

NUMBERS = 1 << 27
"""Of q in one call."""


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What is read without having been written shows."""
    made = torch.empty

    def empty(*shape, **options):
        x = made(*shape, **options)
        return x.fill_(float("nan") if x.is_floating_point() else 1 << 30)

    monkeypatch.setattr(torch, "empty", empty)


def check(call, times=1):
    o, lse, wanted = call.reference(torch.float32)
    # One rounding to bfloat16 is up to 2^-8, for a whole row where a single dS makes it; 3e-3 is what many rows have.
    limit = 3e-3 if call.q.shape[0] * call.q.shape[1] >= 64 else 5e-3
    for _ in range(times):
        got, found_lse, found = call.run(sparse_attention)
        assert (got.float() - o).norm() <= 3e-3 * o.norm()
        assert (found_lse - lse).abs().max() <= 1e-4
        errors = call.errors(found, wanted)
        assert max(errors.values()) <= limit, errors


def drawn(seed):
    """A call of any shape that the kernels serve."""
    draw = random.Random(seed)
    # Few combinations of what kernels are compiled for, many of what they are called with.
    heads, width, window = draw.choice(
        [(64, 512, 128), (64, 512, 128), (128, 512, 128), (8, 64, 7), (32, 128, 64), (16, 192, 100)]
    )
    most = min(8192, NUMBERS // (heads * width))
    left, lengths = draw.choice([1, 127, 128, 129, 1000, 4095, draw.randint(1, most)]), []
    left = min(left, most)
    while left:
        lengths.append(left if draw.random() < 0.5 else draw.randint(0, left))
        left -= lengths[-1]
    ratio = draw.choice([0, 1, 4, 4, 16, 128])
    keep = draw.choice([None, 64, 512]) if ratio else None
    return Call(
        lengths, heads=heads, width=width, window=window, ratio=ratio, keep=keep, seed=seed, device="cuda",
        sink=draw.choice([1.0, 20.0]),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(200))
def test_drawn_shapes(seed):
    check(drawn(seed))


@pytest.mark.parametrize("length", [1, 127, 128, 129, 4095, 4096])
@pytest.mark.parametrize(("ratio", "keep"), [(0, None), (128, None), (4, None), (4, 512)])
def test_lengths(length, ratio, keep):
    check(Call((length,), heads=64, width=512, window=128, ratio=ratio, keep=keep, device="cuda"), times=3)


@pytest.mark.parametrize(
    ("lengths", "heads", "ratio", "keep"),
    [
        ((8192,), 64, 128, None),
        ((8192,), 64, 4, 512),
        ((4096,), 128, 4, 1024),
        ((5000, 1, 130, 3061), 64, 4, 512),
        ((5000, 1, 130, 3061), 64, 128, None),
        ((16384,), 64, 0, None),
    ],
)
def test_long_calls(lengths, heads, ratio, keep):
    check(Call(lengths, heads=heads, width=512, window=128, ratio=ratio, keep=keep, device="cuda"), times=2)


@pytest.mark.parametrize("form", ["near", "dense", "gather"])
def test_gradients_have_the_same_bits_again(form):
    lengths, keep = {"near": ((4096,), None), "dense": ((4096,), 512), "gather": ((8192,), 512)}[form]
    ratio = 128 if form == "near" else 4
    call = Call(lengths, heads=64, width=512, window=128, ratio=ratio, keep=keep, device="cuda")
    assert {slab.form for slab in slabs(call.segments, ratio, 64, keep)} >= {form}
    # Near and dense promise it of themselves.
    torch.use_deterministic_algorithms(form == "gather")
    try:
        first, *others = (call.run(sparse_attention) for _ in range(3))
        _, _, wanted = call.reference(torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip((*first[:2], *first[2]), (*other[:2], *other[2]), strict=True))
    assert max(call.errors(first[2], wanted).values()) <= 3e-3


def test_more_numbers_than_32_bits_count():
    tokens = 2**31 // (64 * 512) + 77
    call = Call((tokens - 300, 300), heads=64, width=512, window=128, ratio=128, device="cuda")
    o, lse, found = call.run(sparse_attention)
    assert all(bool(x.isfinite().all()) for x in (o, lse, *found))
    # The second document alone gives the same.
    alone = Call((300,), heads=64, width=512, window=128, ratio=128, device="cuda")
    alone.q, alone.do, alone.window, alone.sink = call.q[-300:], call.do[-300:], call.window[-300:], call.sink
    alone.entries = call.entries[-2:]
    assert sight(call.segments, 128).entries == len(call.entries)
    wanted_o, _, wanted = alone.reference(torch.float32)
    assert (o[-300:].float() - wanted_o).norm() <= 3e-3 * wanted_o.norm()
    assert (found[0][-300:].float() - wanted[0]).norm() <= 3e-3 * wanted[0].norm()
    assert (found[1][-300:].float() - wanted[1]).norm() <= 3e-3 * wanted[1].norm()
