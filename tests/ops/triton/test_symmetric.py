"""Symmetric products against those in float64, every buffer poisoned."""

from __future__ import annotations

import pytest
import torch

from undertow.ops.triton.optimizer import symmetric as module
from undertow.ops.triton.optimizer.symmetric import refusal, symmetric_product


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What is read without having been written shows."""
    monkeypatch.setattr(
        module.torch, "empty", lambda shape, dtype, device: torch.full(shape, float("nan"), dtype=dtype, device=device)
    )


@pytest.fixture(params=[(16, 16), (16, 32), (16, 64)])
def small(request, monkeypatch):
    bm, bn = request.param
    tile = {"BM": bm, "BN": bn, "BK": 32, "STAGES": 1, "num_warps": 4}
    monkeypatch.setattr(module, "tiles", lambda *_: tile)


def stack(*shape, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16().to(device)


def close(found, wanted):
    assert torch.equal(found, found.mT)
    assert float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30)) <= 3e-3


@pytest.mark.parametrize("shape", [(0, 16, 32), (1, 16, 16), (2, 48, 80), (2, 80, 16)])
def test_gram_and_its_square(shape, small, device):
    x = stack(*shape, device=device)
    gram = symmetric_product(x)
    close(gram, torch.bmm(x.double(), x.mT.double()))
    wide = gram.double()
    found = symmetric_product(gram, gram, 2.0315, -4.775)
    close(found, 2.0315 * torch.bmm(wide, wide) - 4.775 * wide)


def test_matrices_do_not_touch_each_other(small, device):
    x = stack(3, 48, 32, device=device)
    alone = torch.cat([symmetric_product(matrix[None]) for matrix in x])
    assert torch.equal(symmetric_product(x), alone)
    x[1] = float("nan")
    found = symmetric_product(x)
    assert found[1].isnan().all() and torch.equal(found[[0, 2]], alone[[0, 2]])


def test_matrices_that_lie_transposed(small, device):
    x = stack(2, 32, 64, device=device)
    assert torch.equal(symmetric_product(x.mT), symmetric_product(x.mT.contiguous()))


def test_other_matrices_are_refused():
    x = torch.zeros((), dtype=torch.bfloat16).expand(128, 256, 512)
    assert refusal(x) is None
    for other in (x.float(), x[:, :240], x[..., :500], x[:, :, :8], x[:100], x[:1].expand(70000, -1, -1)):
        assert refusal(other)
