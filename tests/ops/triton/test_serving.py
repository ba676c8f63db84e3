"""Operators as a model on a GPU calls them: by a kernel where it serves the call, otherwise by the reference."""

import copy

import pytest
import torch

from tests.ops.compare import Draw
from tests.ops.triton.attention.calls import Call
from undertow.config.errors import InputError
from undertow.ops.calls import Calls
from undertow.ops.reference.attention import sparse_attention as reference
from undertow.ops.registry import REFERENCE, Machine, choose, function
from undertow.ops.triton.attention.sparse import sparse_attention as kernel
from undertow.quant.quantise import quantise
from undertow.quant.quantised import Quantised
from undertow.quant.scheme import MXFP4, WEIGHTS

GPU = Machine("cuda", "sm_90")


def equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip((*a[:2], *a[2]), (*b[:2], *b[2]), strict=True))


def test_a_call_goes_where_it_is_served(device):
    call = Call([5, 9], ratio=4, keep=1, device=device)
    calls = Calls()
    serve = function(choose("csa_attention", GPU), calls=calls)
    narrow, exact = call.run(serve), call.run(reference, torch.float64)
    assert equal(narrow, call.run(kernel)) and not equal(narrow, call.run(reference))
    assert (narrow[0] - exact[0]).norm() <= 3e-3 * exact[0].norm()
    assert calls.taken == {"csa_attention": {"triton": 1}} and calls.news() == []
    assert equal(call.run(serve, torch.float32), call.run(reference, torch.float32))
    assert calls.taken == {"csa_attention": {"triton": 1, "reference": 1}}
    assert calls.news() == [
        "csa_attention by reference instead of triton: the kernels compute in bfloat16, not float32"
    ]
    named = function(choose("csa_attention", GPU, "triton"))
    with pytest.raises(InputError, match="cannot serve this call: the kernels compute in bfloat16, not float32"):
        call.run(named, torch.float32)


def test_what_serves_can_be_copied():
    serve = function(choose("indexer_select", GPU))
    twin = copy.deepcopy(serve)
    assert twin.args == serve.args == (choose("indexer_select", GPU), Calls())


@pytest.mark.parametrize("scheme", [WEIGHTS, MXFP4], ids=["fp8", "mxfp4"])
def test_products_with_quantised_weights_go_where_they_are_served(scheme, device):
    draw = Draw(str(scheme))
    weight, x = quantise(draw.normal(2, 32, 128).to(device), scheme), draw.normal(5, 128, dtype=torch.bfloat16)
    one, counts = Quantised(weight.payload[0], weight.scales[0], scheme.block), torch.tensor([2, 3], device=device)
    for op, operands in (("linear_quantised", (one,)), ("grouped_linear_quantised", (weight, counts))):
        for rows, taken in ((x.to(device), "triton"), (x.float().to(device), "reference")):
            calls = Calls()
            got = function(choose(op, GPU), calls=calls)(rows, *operands)
            assert calls.taken == {op: {taken: 1}}
            exact = REFERENCE[op](rows.float(), *operands)
            assert got.dtype == rows.dtype and (got.float() - exact).norm() <= 3e-3 * exact.norm()
        assert choose(op, GPU, invariant=True).chosen == "reference"
