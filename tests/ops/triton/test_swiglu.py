"""Clamped SwiGLU of the kernels against the definition in float64 on the same inputs, every buffer poisoned."""

import pytest
import torch

from undertow.ops.reference import experts
from undertow.ops.triton.swiglu import gated as module
from undertow.ops.triton.swiglu.gated import refusal, swiglu

LIMIT = 2.0
BOUNDS = {torch.bfloat16: 3e-3, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What is read without having been written shows."""
    monkeypatch.setattr(
        module.torch, "empty", lambda shape, dtype, device: torch.full(shape, float("nan"), dtype=dtype, device=device)
    )


def operands(rows, width, joined, weighted, dtype, device, seed=0):
    """Gate and up, apart or joined, of about twice the limit, and weights: float64 leaves of numbers that fit
    `dtype`, and leaves in it."""
    generator = torch.Generator().manual_seed(seed)
    widths = [2 * width] if joined else [width] * 2
    given = [(2 * LIMIT * torch.randn(rows, size, generator=generator)).to(dtype) for size in widths]
    if weighted:
        given.append(torch.randn(rows, generator=generator))
    exact = [x.double().requires_grad_() for x in given]
    return exact, [x.to(device).requires_grad_() for x in given]


def run(function, leaves, joined, grad, limit=LIMIT):
    gate, *rest = leaves
    up = None if joined else rest.pop(0)
    out = function(gate, up, limit, *rest)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def relative(found, wanted):
    difference = (found.cpu().double() - wanted).norm()
    return float(difference / wanted.norm().clamp_min(1e-30))


def check(rows, width, joined, weighted, dtype, device, columns=None, monkeypatch=None, height=1):
    if columns:
        tile = {"ROWS": height, "COLUMNS": columns, "STAGES": 1, "num_warps": 4}
        monkeypatch.setattr(module, "tiles", lambda *_: tile)
    exact, leaves = operands(rows, width, joined, weighted, dtype, device)
    grad = torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = run(experts.swiglu, exact, joined, grad.double())
    found = run(swiglu, leaves, joined, grad.to(device))
    assert [x.dtype for x in found] == [dtype, *(x.dtype for x in leaves)]
    assert [x.shape for x in found] == [x.shape for x in wanted]
    errors = [relative(f, w) for f, w in zip(found, wanted, strict=True)]
    assert max(errors) <= BOUNDS[dtype], errors
    again = run(swiglu, leaves, joined, grad.to(device))
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (1, 48), (7, 33), (5, 130)])
def test_equals_the_definition(rows, width, joined, weighted, dtype, device):
    check(rows, width, joined, weighted, dtype, device)


@pytest.mark.parametrize(("height", "columns"), [(1, 16), (4, 32), (8, 64)])
def test_rows_in_several_pieces_and_several_rows_at_once(height, columns, device, monkeypatch):
    check(6, 75, True, True, torch.bfloat16, device, columns, monkeypatch, height)
    check(6, 75, False, False, torch.float32, device, columns, monkeypatch, height)


def test_clamps_and_what_passes_them(device):
    """The gate is bounded above, up on both sides, the bounds belong to the inside; a NaN stays one."""
    gate = torch.tensor([[12.0, -50.0, 3.0, 3.0, 9.0, 10.0, float("nan"), 1.0]], device=device, requires_grad=True)
    up = torch.tensor([[2.0, 2.0, 11.0, -11.0, -9.0, -10.0, 1.0, float("nan")]], device=device, requires_grad=True)
    out = swiglu(gate, up, 10.0)
    silu = torch.nn.functional.silu(torch.tensor([10.0, -50.0, 3.0, 3.0, 9.0, 10.0]))
    wanted = silu * torch.tensor([2.0, 2.0, 10.0, -10.0, -9.0, -10.0])
    torch.testing.assert_close(out[0, :6].detach().cpu(), wanted)
    assert out[0, 6:].isnan().all()
    grad_gate, grad_up = torch.autograd.grad(out, [gate, up], torch.ones_like(out))
    assert grad_gate[0, 6:].isnan().all() and grad_up[0, 6:].isnan().tolist() == [True, False]  # as the reference's
    assert (grad_gate[0, :6] != 0).tolist() == [False, True, True, True, True, True]
    assert (grad_up[0, :6] != 0).tolist() == [True, True, False, False, True, True]


@pytest.mark.parametrize("joined", [False, True])
def test_extremes_stay_finite(joined, device):
    values = torch.tensor([-1e4, -200.0, -89.0, 0.0, 89.0, 200.0, 1e4], dtype=torch.bfloat16)
    gate, up = (x.flatten()[None] for x in torch.meshgrid(values, values, indexing="ij"))
    leaves = [x.to(device).requires_grad_() for x in ([torch.cat((gate, up), 1)] if joined else [gate, up])]
    leaves.append(torch.full((1,), 1e4, device=device, requires_grad=True))
    grad = torch.full(gate.shape, 1e6, dtype=torch.bfloat16, device=device)
    found = run(swiglu, leaves, joined, grad, 10.0)
    assert all(torch.isfinite(x).all() for x in found)


def test_what_lies_apart_in_memory(device):
    """Halves of a wider matrix, a gradient that is expanded, and weights with steps between them."""
    both = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).to(device)
    weight = torch.linspace(-1, 1, 12, device=device)[::2]
    leaves = [x.detach().requires_grad_() for x in (both[:, :20], both[:, 25:45], weight)]
    exact = [x.detach().cpu().double().requires_grad_() for x in leaves]
    grad = torch.ones((), device=device).expand(6, 20)
    found, wanted = run(swiglu, leaves, False, grad), run(experts.swiglu, exact, False, grad.cpu().double())
    assert max(relative(f, w) for f, w in zip(found, wanted, strict=True)) <= 1e-5


def test_keeps_its_inputs_and_nothing_else(device):
    both = torch.randn(4, 16, device=device, requires_grad=True)
    weight = torch.randn(4, device=device, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        swiglu(both, None, LIMIT, weight)
    assert {x.data_ptr() for x in kept} == {both.data_ptr(), weight.data_ptr()}


def test_other_calls_are_refused():
    x = torch.zeros(4, 6)
    assert refusal(x, x) is None and refusal(x, None, torch.zeros(4)) is None
    for call in (
        (x.double(), None),
        (x, x.bfloat16()),
        (x.t(), None),
        (x[:, :5], None),
        (x[None], None),
        (x, None, torch.zeros(4, dtype=torch.bfloat16)),
    ):
        assert refusal(*call)
