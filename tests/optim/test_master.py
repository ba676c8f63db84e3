"""float32 weights as a bfloat16 and sixteen bits."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from undertow.optim.master import join_master, split_master


def floats(patterns) -> torch.Tensor:
    """float32 of unsigned bit patterns."""
    return (
        (torch.as_tensor(patterns, dtype=torch.int64) - (1 << 32) * (torch.as_tensor(patterns) >= 1 << 31))
        .to(torch.int32)
        .view(torch.float32)
    )


def check(master: torch.Tensor) -> None:
    weight, remainder = split_master(master)
    assert (weight.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    again, nan = join_master(weight, remainder), master.isnan()
    assert torch.equal(again.view(torch.int32)[~nan], master.view(torch.int32)[~nan])
    assert again[nan].isnan().all() and weight[nan].isnan().all()
    # The nearest bfloat16; torch takes the even one of two equally near, this the larger.
    nearest, tie = master.to(torch.bfloat16), (master.view(torch.int32) & 0xFFFF) == 0x8000
    sure = ~nan & ~tie
    assert torch.equal(weight[sure], nearest[sure])
    assert (weight[tie & ~nan].float().abs() >= nearest[tie & ~nan].float().abs()).all()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_every_bit_pattern(patterns):
    check(floats(patterns))


def test_every_low_half_under_telling_high_halves():
    low = torch.arange(1 << 16)
    # Zeros, denormals, ones, the largest numbers, infinities and NaNs, of both signs.
    for high in (0x0000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x7F7F, 0x7F80, 0x7FFF):
        for sign in (0, 0x8000):
            check(floats(((high | sign) << 16) + low))


def test_random_bit_patterns():
    check(floats(torch.randint(0, 1 << 32, (1 << 20,), generator=torch.Generator().manual_seed(0))))
