"""The order of choices by expert: counts, slots and their inverse against a sort, in one span and in several."""

import pytest
import torch

from tests.ops.compare import Draw
from undertow.ops.reference import experts as reference
from undertow.ops.triton.permute import order as module
from undertow.ops.triton.permute.order import dispatch_order, refusal


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What is read without having been written shows."""
    monkeypatch.setattr(
        module.torch, "empty", lambda size, dtype, device: torch.full(
            size if isinstance(size, tuple) else (size,), torch.iinfo(dtype).max, dtype=dtype, device=device
        )
    )  # fmt: skip


def check(indices, experts, device):
    found, want = dispatch_order(indices.to(device), experts), reference.dispatch_order(indices, experts)
    for name in ("choice", "slot", "counts"):
        got = getattr(found, name)
        assert got.dtype == torch.int32 and got.device.type == device
        assert got.tolist() == getattr(want, name).tolist(), name
    assert found.k == indices.shape[1]


@pytest.mark.parametrize(
    ("tokens", "k", "experts"),
    [(1, 1, 1), (1, 6, 256), (7, 3, 5), (43, 6, 8), (150, 6, 256), (90, 7, 1000)],
)
def test_order(tokens, k, experts, device):
    check(Draw(tokens, k, experts).integers(experts, tokens, k), experts, device)


def test_one_expert_takes_all(device):
    for expert in (0, 3, 4):
        check(torch.full((200, 4), expert), 5, device)


def test_int32_and_strides(device):
    indices = Draw("strides").integers(9, 4, 90).t()
    check(indices, 9, device)
    check(indices.int(), 9, device)


@pytest.mark.parametrize(
    ("smaller", "sizes"),
    [
        ({"SPANS": 3}, (260, 5, 30)),
        ({"SPANS": 1}, (300, 3, 9)),  # more choices of a span than a byte counts
        ({"BLOCK": 32, "OTHERS": 16, "PARTS": 4}, (70, 3, 11)),  # spans shorter than what is counted at a time
    ],
)
def test_other_spans(smaller, sizes, device, monkeypatch):
    shipped = module.tiles
    more = {"place": smaller}
    monkeypatch.setattr(module, "tiles", lambda device, kernel: {**shipped(device, kernel), **more.get(kernel, {})})
    tokens, k, experts = sizes
    check(Draw(sizes).integers(experts, tokens, k), experts, device)


def test_all_of_a_span_choose_one(device, monkeypatch):
    """As many as a span has: a number of its own size must hold them."""
    shipped = module.tiles
    monkeypatch.setattr(module, "tiles", lambda device, kernel: {**shipped(device, kernel), "SPANS": 2, "BLOCK": 256})
    check(torch.full((256, 2), 3), 5, device)


def test_no_tokens(device):
    check(torch.zeros(0, 2, dtype=torch.int64), 3, device)


def test_refusals():
    assert refusal(torch.zeros(4, 2, dtype=torch.int64), 1024) is None
    assert refusal(torch.zeros(4, 2, dtype=torch.int64), 1025) == "1025 experts, more than 1024"
    assert refusal(torch.zeros(4, 2), 8) == "choices are float32, neither int32 nor int64"
    many = torch.zeros((), dtype=torch.int64).expand(1 << 29, 2)
    assert refusal(many, 8) == "1073741824 choices, 1073741824 or more"
