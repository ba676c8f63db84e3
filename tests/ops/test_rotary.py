"""Interleaved partial rotary embedding against complex multiplication."""

from __future__ import annotations

import math

import pytest
import torch

from tests.ops import naive
from tests.ops.compare import DTYPES, Draw, check, relative
from undertow.ops.reference.rotary import head_norm_rotary, rotary

PAIRS = 3


def tables(positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    angles = naive.angles(positions, PAIRS)
    table = torch.float64 if dtype == torch.float64 else torch.float32
    return angles, torch.cos(angles).to(table), torch.sin(angles).to(table)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(11, 2 * PAIRS), (11, 10), (11, 2, 10), (1, 2, 3, 9), (0, 2, 10)])
def test_rotary(shape, dtype, inverse):
    x = Draw(shape).normal(*shape, dtype=dtype)
    angles, cos, sin = tables(torch.arange(len(x)) * 7, dtype)
    sign = -1 if inverse else 1
    check(lambda x: rotary(x, cos, sin, inverse=inverse), lambda x: naive.rotary(x, sign * angles), [x])


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_normalised_before_they_are_rotated(dtype):
    q = Draw("heads").normal(11, 2, 10, dtype=dtype, scale=3.0)
    angles, cos, sin = tables(torch.arange(11) * 7, dtype)
    check(
        lambda q: head_norm_rotary(q, cos, sin, 0.1), lambda q: naive.rotary(naive.rms_norm(q, None, 0.1), angles), [q]
    )


def test_pairs_are_neighbours_not_halves():
    x = torch.arange(1.0, 7.0, dtype=torch.float64).view(1, 6)
    quarter = torch.full((1, 2), math.pi / 2, dtype=torch.float64)
    out = rotary(x, torch.cos(quarter), torch.sin(quarter))
    torch.testing.assert_close(out, torch.tensor([[1.0, 2.0, -4.0, 3.0, -6.0, 5.0]], dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_dimensions_pass_to_the_bit(dtype):
    x = Draw("leading").normal(5, 2, 16, dtype=dtype)
    _, cos, sin = tables(torch.arange(5), dtype)
    assert torch.equal(rotary(x, cos, sin)[..., : 16 - 2 * PAIRS], x[..., : 16 - 2 * PAIRS])


def test_inverse_restores_and_position_zero_does_nothing():
    x = Draw("inverse").normal(6, 2, 10, dtype=torch.float64)
    _, cos, sin = tables(torch.arange(6) * 1000, torch.float64)
    assert relative(rotary(rotary(x, cos, sin), cos, sin, inverse=True), x) < 1e-15
    assert torch.equal(rotary(x, cos, sin)[0], x[0])


def test_scores_depend_on_distance_alone():
    draw = Draw("distance")
    q, k = draw.normal(1, 10, dtype=torch.float64), draw.normal(1, 10, dtype=torch.float64)

    def score(i: int, j: int) -> float:
        _, ci, si = tables(torch.tensor([i]), torch.float64)
        _, cj, sj = tables(torch.tensor([j]), torch.float64)
        return (rotary(q, ci, si) * rotary(k, cj, sj)).sum().item()

    assert score(9, 4) == pytest.approx(score(1005, 1000), rel=1e-10)
    assert score(9, 4) != pytest.approx(score(9, 5), rel=1e-3)


def test_input_and_tables_are_left_alone():
    x = Draw("alone").normal(3, 8).requires_grad_()
    before = x.detach().clone()
    _, cos, sin = tables(torch.arange(3), torch.float32)
    tables_before = cos.clone(), sin.clone()
    rotary(x, cos, sin).sum().backward()
    assert torch.equal(x, before)
    assert torch.equal(cos, tables_before[0])
    assert torch.equal(sin, tables_before[1])
