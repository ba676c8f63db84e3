"""Pooling kernels against the reference in float64: both kinds of window, absent slots, rows of no or many windows."""

import pytest
import torch

from tests.ops.compare import Draw, relative
from undertow.ops.reference.compress import Running
from undertow.ops.reference.compress import compress_pool as reference
from undertow.ops.triton.compress import pool
from undertow.ops.triton.compress.pool import compress_pool, refusal


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What is read without having been written shows."""

    def empty(*shape, dtype, device):
        return torch.full(shape[0] if isinstance(shape[0], tuple) else shape, torch.nan, dtype=dtype, device=device)

    monkeypatch.setattr(pool.torch, "empty", empty)
    monkeypatch.setattr(pool.torch, "empty_like", lambda x: torch.full_like(x, torch.nan))


def operands(rows: int, slots: int, channels: int, device: str, scale: float = 1.0):
    draw = Draw(rows, slots, channels)
    sizes = ((rows, 1.0), (rows, scale), (slots, 1.0))
    return [draw.normal(n, channels, scale=s).to(device) for n, s in sizes]


def plain(lengths: list[int], ratio: int) -> torch.Tensor:
    """Windows of packed documents, the last of each perhaps open."""
    found, start = [], 0
    for n in lengths:
        token = torch.arange(-(-n // ratio) * ratio).view(-1, ratio)
        found.append(torch.where(token < n, token + start, -1))
        start += n
    return torch.cat(found)


def overlapping(lengths: list[int], ratio: int) -> torch.Tensor:
    """Of each group the overlap half of the one before it, none for a document's first, and its own half."""
    own, before = plain(lengths, ratio), []
    for n in lengths:
        groups = -(-n // ratio)
        mine = own[sum(len(b) for b in before) :][:groups]
        before.append(torch.cat([torch.full_like(mine[:1], -1), mine[:-1]]))
    return torch.cat([torch.cat(before), torch.where(own < 0, -1, own + sum(lengths))], 1)


def outcome(op, leaves, slots, grad):
    mine = [x.detach().clone().requires_grad_() for x in leaves]
    entry, run = op(*mine, slots)
    assert not any(part.requires_grad for part in run)
    return entry, run, torch.autograd.grad(entry, mine, grad.to(entry.dtype))


def check(leaves, slots, tolerance: float = 1e-5):
    slots = slots.to(leaves[0].device)
    grad = Draw("upstream").normal(len(slots), leaves[0].shape[1]).to(slots.device)
    entry, run, grads = outcome(compress_pool, leaves, slots, grad)
    exact, exact_run, exact_grads = outcome(reference, [x.double() for x in leaves], slots, grad)
    for got, want in zip((entry, *run, *grads), (exact, *exact_run, *exact_grads), strict=True):
        assert got.dtype == torch.float32 and relative(got, want) <= tolerance
    alone, same = compress_pool(*leaves, slots)
    assert torch.equal(alone, entry) and all(torch.equal(a, b) for a, b in zip(same, run, strict=True))
    again = outcome(compress_pool, leaves, slots, grad)[2]
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    return grads


@pytest.mark.parametrize(
    ("lengths", "ratio", "channels"),
    [([21, 0, 1, 9], 7, 33), ([200], 128, 40), ([1], 8, 1), ([20, 3], 2, 100)],
)
def test_plain_windows(lengths, ratio, channels, device):
    check(operands(sum(lengths), ratio, channels, device), plain(lengths, ratio))


@pytest.mark.parametrize("lengths", [[16], [5, 0, 13, 3, 8], [1]], ids=str)
def test_overlapping_windows(lengths, device):
    """The overlap half of a document's last group is in no window, and gets a gradient of 0."""
    grads = check(operands(2 * sum(lengths), 8, 24, device), overlapping(lengths, 4))
    end = sum(lengths)
    assert all((g[end - 1] == 0).all() for g in grads[:2])


def test_programs_take_several_windows(device, monkeypatch):
    small = {
        "forward": {"ELEMENTS": 64, "num_warps": 4},
        "backward": {"ELEMENTS": 64, "PROGRAMS": 3, "num_warps": 4},
        "rows": {"BR": 4, "BC": 16, "num_warps": 4},
        "sum": {"BP": 2, "BLOCK": 32, "num_warps": 4},
    }
    monkeypatch.setattr(pool, "tiles", lambda _, kernel: dict(small[kernel]))
    check(operands(22, 3, 20, device), plain([22], 3))


def test_rows_of_several_windows(device, monkeypatch):
    monkeypatch.setattr(pool, "_SCANNED", 4)
    check(operands(9, 4, 5, device), torch.tensor([[-1, -1, 0, 1], [0, 1, 4, 5], [5, 4, 3, 5], [8, -1, 5, 8]]))


@pytest.mark.parametrize("absent", [1e30, torch.inf, torch.nan])
def test_absent_slots_have_weight_zero(absent, device):
    """Row 0 stands in for absent slots in the reference; here nothing of it is read."""
    leaves = operands(5, 4, 3, device)
    slots = torch.tensor([[-1, 1, 2, -1], [3, -1, -1, -1]])
    wanted = outcome(compress_pool, leaves, slots.to(device), torch.ones(2, 3, device=device))
    leaves[0][0] = leaves[1][0] = absent
    found = outcome(compress_pool, leaves, slots.to(device), torch.ones(2, 3, device=device))
    assert torch.equal(found[0], wanted[0])
    assert all(torch.equal(a, b) for a, b in zip(found[2], wanted[2], strict=True))
    assert (found[2][0][0] == 0).all() and (found[2][2][3] == 0).all()


def test_wide_gates(device):
    check(operands(12, 4, 5, device, scale=30.0), plain([12], 4))


def test_gates_of_any_size(device):
    """One slot has all the weight; float32 knows its gate to 1e-3."""
    leaves, slots = operands(12, 4, 5, device, scale=1e4), plain([12], 4).to(device)
    entry, run, grads = outcome(compress_pool, leaves, slots, torch.ones(3, 5, device=device))
    exact = reference(*(x.double() for x in leaves), slots)
    assert relative(entry, exact[0]) < 1e-4 and relative(run.top, exact[1].top) < 1e-6
    assert all(g.isfinite().all() for g in grads)
    assert relative(grads[0].sum(0), torch.full((5,), 3.0, device=device)) < 2e-3


def test_a_window_without_slots(device):
    leaves, slots = operands(3, 2, 4, device), torch.tensor([[0, 1], [-1, -1]], device=device)
    grad = torch.tensor([[1.0], [0.0]], device=device).expand(2, 4)
    entry, run, grads = outcome(compress_pool, leaves, slots, grad)
    assert entry[1].isnan().all() and entry[0].isfinite().all()
    assert (run.top[1] == -torch.inf).all() and (run.weight[1] == 0).all() and (run.value[1] == 0).all()
    assert all(g.isfinite().all() for g in grads) and (grads[0][2] == 0).all()


def test_no_windows(device):
    leaves = [torch.zeros(n, 3, device=device) for n in (2, 2, 4)]
    entry, run, grads = outcome(
        compress_pool, leaves, torch.zeros(0, 4, dtype=torch.int64, device=device), torch.zeros(0, 3, device=device)
    )
    assert entry.shape == run.top.shape == (0, 3)
    assert all((g == 0).all() and g.shape == x.shape for g, x in zip(grads, leaves, strict=True))


def test_strided_operands(device):
    leaves = operands(12, 4, 6, device)
    slots = plain([12], 4).to(device)
    wanted = compress_pool(*leaves, slots)[0]
    turned = [x.t().contiguous().t() for x in leaves]
    assert torch.equal(compress_pool(*turned, slots.t().contiguous().t())[0], wanted)


def test_refusals():
    leaves, slots = operands(4, 2, 3, "cpu"), plain([4], 2)

    def reason(u=leaves[0], slots=slots, **rest) -> str:
        return refusal(u, leaves[1], leaves[2], slots, **rest) or ""

    assert reason() == ""
    assert "values are float64, not float32" in reason(u=leaves[0].double())
    assert "slots are int32" in reason(slots=slots.int())
    assert "windows of 257 slots, not 1 to 256" in reason(slots=slots.new_zeros(1, 257))
    assert "continue those of an earlier call" in reason(state=Running.empty(2, 3, leaves[0]))
    assert "batch_invariant" in reason(invariant=True)
