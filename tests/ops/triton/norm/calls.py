"""Calls of a kernel and of its definition in float64, on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.ops.compare import Draw, relative

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-3}
DTYPES = tuple(TOLERANCE)
EPS = 1e-6


def tables(tokens: int, pairs: int, device: str, step: float = 7.3) -> tuple[Tensor, Tensor]:
    """cos and sin `[tokens, pairs]` float32."""
    angles = torch.arange(tokens)[:, None] * step / 10.0 ** torch.arange(pairs)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def run(op: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """The result and the gradients of all inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = op(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def check(op: Callable[..., Tensor], definition: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    """Result and gradients of `op` are those of `definition` in float64, in the types of result and inputs."""
    x = inputs[0]
    grad = Draw("upstream", x.shape).normal(*x.shape, dtype=x.dtype).to(x.device)
    got = run(op, inputs, grad)
    want = run(definition, [x.double() for x in inputs], grad.double())
    assert [g.dtype for g in got] == [x.dtype, *(i.dtype for i in inputs)]
    errors = [(relative(g, w), TOLERANCE[g.dtype]) for g, w in zip(got, want, strict=True)]
    assert all(error <= allowed for error, allowed in errors), errors
