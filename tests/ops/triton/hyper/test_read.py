"""What a sub-layer reads of the streams, and its gradients, against the definition in float64 on the same inputs."""

import pytest
import torch

from tests.ops.compare import Draw, relative, same_bits
from undertow.ops.reference.hyper import hyper_in as definition
from undertow.ops.triton.hyper import tiles
from undertow.ops.triton.hyper.project import cut
from undertow.ops.triton.hyper.read import hyper_in, refusal

NARROW, WIDE = 3e-3, 1e-5
RESULTS = ("x", "post", "mix", "streams")
OPERANDS = ("streams", "fn", "scale", "base", "weight")


class Call:
    """Operands and upstream gradients of a call; `size` is that of the coefficients."""

    def __init__(self, tokens, n, width, device, size=1.0, iterations=20, upstream=1.0):
        draw, rows = Draw("read", tokens, n, width), (2 + n) * n
        self.operands = [
            draw.normal(tokens, n, width, dtype=torch.bfloat16),
            draw.normal(rows, n * width, scale=(n * width) ** -0.5),
            draw.normal(3, scale=size),
            draw.normal(rows, scale=size),
            (1 + draw.normal(width, scale=0.1)).bfloat16(),
        ]
        self.operands = [x.to(device) for x in self.operands]
        shapes = ((tokens, width), (tokens, n), (tokens, n, n), (tokens, n, width))
        self.grads = [draw.normal(*shape, scale=upstream).to(device) for shape in shapes]
        self.numbers = (1e-6, iterations, 1e-6)

    def run(self, op, dtype=None, results=range(4), operands=None):
        """Results, and gradients of all operands from the given results."""
        leaves = [x.to(dtype or x.dtype) for x in operands or self.operands]
        leaves = [x.detach().requires_grad_() for x in leaves]
        found = op(*leaves, *self.numbers)
        used, ups = [found[i] for i in results], [self.grads[i].to(found[i].dtype) for i in results]
        grads = torch.autograd.grad(used, leaves, ups, allow_unused=True)
        return found, [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]

    def check(self, results=range(4), operands=None, wide=WIDE):
        found, grads = self.run(hyper_in, results=results, operands=operands)
        # The definition gets the gradients that the kernels get, which are rounded.
        self.grads = [g.to(x.dtype) for g, x in zip(self.grads, found, strict=True)]
        wanted, exact = self.run(definition, torch.float64, results, operands)
        for names, mine, theirs in ((RESULTS, found, wanted), (OPERANDS, grads, exact)):
            for name, a, b in zip(names, mine, theirs, strict=True):
                error = relative(a, b)
                assert error <= (NARROW if a.dtype == torch.bfloat16 else wide), (name, error)
        assert [g.dtype for g in grads] == [x.dtype for x in self.operands]


@pytest.mark.parametrize(
    ("tokens", "n", "width", "iterations"), [(5, 4, 72, 20), (37, 2, 40, 2), (1, 4, 64, 1), (3, 4, 264, 20)]
)
def test_values_and_gradients(tokens, n, width, iterations, device):
    Call(tokens, n, width, device, iterations=iterations).check()


def test_several_slabs_and_chunks(device, monkeypatch):
    monkeypatch.setitem(tiles.DEFAULT, "read", {**tiles.DEFAULT["read"], "SLAB": 32})
    Call(70, 2, 16, device, iterations=1).check()


@pytest.mark.parametrize("results", [(0,), (2,), (1, 3)])
def test_results_that_nobody_used(results, device):
    Call(4, 4, 40, device, iterations=4).check(results)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("size", [30.0, 1e4])
def test_saturated_coefficients_and_large_gradients(size, device):
    """Upstream gradients of 1e6, sigmoids at their ends, Sinkhorn's iteration far from converged."""
    call = Call(6, 4, 32, device, size=size, upstream=1e6)
    found, grads = call.run(hyper_in)
    assert all(torch.isfinite(x).all() for x in (*found, *grads))
    if size < 100:
        call.check(wide=2e-4)


def test_streams_that_repeat_one(device):
    """The embedding is the same in all streams, and is not copied."""
    call = Call(5, 4, 32, device, iterations=2)
    one = call.operands[0][:, :1].expand(-1, 4, -1)
    apart = call.operands[0].transpose(1, 2).contiguous().transpose(1, 2)
    for streams in (one, apart):
        call.check(operands=[streams, *call.operands[1:]])


def test_little_is_saved_and_streams_come_back(device):
    call, saved = Call(5, 4, 64, device, iterations=2), {}

    def pack(x):
        saved[x.data_ptr()] = x.numel() * x.element_size()
        return x

    leaves = [x.clone().requires_grad_() for x in call.operands]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        found = hyper_in(*leaves, *call.numbers)
    assert found[3].data_ptr() == leaves[0].data_ptr()
    mine = {x.data_ptr() for x in leaves}
    assert sum(size for place, size in saved.items() if place not in mine) == 5 * 4 * (24 + 1 + 1)


def test_same_bits_in_any_order_of_programs(device, backwards):
    call = Call(35, 2, 16, device, iterations=1)
    first = call.run(hyper_in)
    backwards()
    again = call.run(hyper_in)
    assert same_bits((*first[0], *first[1]), (*again[0], *again[1]))


def test_fn_in_three_parts(device):
    fn = Draw("parts").normal(8, 33).to(device)
    parts = cut(fn)
    assert parts.dtype == torch.bfloat16 and torch.equal(parts[0], fn.bfloat16())
    assert torch.equal(parts.double().sum(0), fn.double())


def test_no_tokens(device):
    call = Call(0, 4, 32, device)
    found, grads = call.run(hyper_in)
    assert [tuple(x.shape) for x in found] == [(0, 32), (0, 4), (0, 4, 4), (0, 4, 32)]
    assert [x.abs().sum().item() for x in grads] == [0.0] * 5
    assert [x.shape for x in grads] == [x.shape for x in call.operands]


def test_refusals():
    def told(change=None, iterations=20, invariant=False, n=4, width=16):
        fn, rows = torch.zeros((2 + n) * n, n * width), (2 + n) * n
        operands = [torch.zeros(1, n, width, dtype=torch.bfloat16), fn, torch.zeros(3), torch.zeros(rows)]
        if change is not None:
            operands[change] = operands[change].double()
        return refusal(*operands, iterations, invariant=invariant)

    assert told() is None and told(n=2, iterations=1) is None
    assert told(0) == "the kernels take streams of bfloat16, not float64"
    assert told(1) == "the kernels take fn of float32, not float64"
    assert told(3) == "the kernels take base of float32, not float64"
    assert told(n=3) == "the kernels take 2 or 4 streams, not 3"
    assert told(width=16392, n=2) == "the kernels take streams of up to 16,384 numbers, not 16,392"
    assert told(iterations=33) == "the kernels take 1 to 32 steps of Sinkhorn's iteration, not 33"
    assert "batch_invariant" in str(told(invariant=True))
