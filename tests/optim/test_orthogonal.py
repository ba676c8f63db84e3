"""The hybrid Newton-Schulz iteration."""

from __future__ import annotations

import pytest
import torch

from tests.optim import plain
from undertow.optim.orthogonal import SCHEDULE, orthogonalise

SHAPES = [(24, 24), (16, 64), (64, 16), (4, 512), (96, 128), (1, 7)]


def test_coefficients_are_the_papers():
    assert SCHEDULE == ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_become_one(shape):
    x = orthogonalise(torch.stack(plain.draws(5, *shape, dtype=torch.float64)), torch.float64)
    values = torch.linalg.svdvals(x)
    assert values.shape == (5, min(shape))
    assert values.min() >= 1.000 - 1e-6 and values.max() <= 1.002


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_polynomial_of_the_singular_values(shape):
    matrices = torch.stack(plain.draws(3, *shape, dtype=torch.float64))
    expected = torch.stack([plain.newton_schulz(matrix) for matrix in matrices])
    assert torch.allclose(orthogonalise(matrices, torch.float64), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
def test_lower_precision_stays_near(dtype, bound):
    matrices = torch.stack(plain.draws(4, 48, 128))
    found = orthogonalise(matrices, dtype)
    assert found.dtype == dtype
    assert (torch.linalg.svdvals(found.double()) - 1).abs().max() < bound + 0.002


@pytest.mark.parametrize("shape", [(48, 128), (128, 48), (32, 32)])
def test_batched_equals_one_by_one(shape):
    matrices = torch.stack(plain.draws(6, *shape))
    alone = torch.cat([orthogonalise(matrix[None], torch.float32) for matrix in matrices])
    assert torch.allclose(orthogonalise(matrices, torch.float32), alone, rtol=0, atol=1e-6)


def test_a_zero_matrix_stays_zero_beside_others():
    matrices = torch.stack([torch.zeros(8, 20), *plain.draws(1, 8, 20)])
    found = orthogonalise(matrices, torch.float32)
    assert torch.equal(found[0], torch.zeros(8, 20))
    assert torch.allclose(found[1], plain.newton_schulz(matrices[1]).float(), atol=1e-5)


@pytest.mark.parametrize("scale", [1e-15, 1e-8, 1e12])
def test_scale_does_not_matter(scale):
    matrices = torch.stack(plain.draws(2, 12, 30))
    found, expected = (orthogonalise(m, torch.float32) for m in (matrices * scale, matrices))
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)


def test_what_is_left_of_a_long_unused_matrix_fades():
    matrices = torch.stack(plain.draws(1, 12, 30)) * 1e-30
    assert orthogonalise(matrices, torch.float32).abs().max() < 1e-4
