"""Calls that launch the kernels of the router and of the permutation, at the sizes of both published models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

Case = tuple[str, bool, Callable[[], object]]
"""A name, whether it is among the few that always run, and a call that launches kernels."""

TOKENS, CHOICES = 4096, 6


def cases() -> Iterator[Case]:
    """Router, order, rows and weights, forward and backward, of v4-flash and of v4-pro."""
    import torch

    from undertow.ops.triton.permute.order import dispatch_order
    from undertow.ops.triton.permute.permute import permute
    from undertow.ops.triton.permute.unpermute import unpermute
    from undertow.ops.triton.permute.weights import permute_weights
    from undertow.ops.triton.router.route import route

    def empty(*shape: int, dtype: torch.dtype = torch.float32, learns: bool = False) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=learns)

    def routed(experts: int, hashed: bool) -> None:
        chosen = empty(TOKENS, CHOICES, dtype=torch.int64) if hashed else None
        bias = None if hashed else empty(experts)
        _, weights, scores = route(empty(TOKENS, experts, learns=True), bias, CHOICES, 1.5, chosen)
        torch.autograd.backward([weights, scores], [torch.empty_like(weights), torch.empty_like(scores)])

    def moved(experts: int, width: int) -> None:
        order = dispatch_order(empty(TOKENS, CHOICES, dtype=torch.int64), experts)
        x = empty(TOKENS, width, dtype=torch.bfloat16, learns=True)
        back = unpermute(permute(x, order), order)
        back.backward(torch.empty_like(back))
        weights = permute_weights(empty(TOKENS, CHOICES, learns=True), order)
        weights.backward(torch.empty_like(weights))

    yield "router of 256", True, partial(routed, 256, hashed=False)
    yield "router of 256, given choice", False, partial(routed, 256, hashed=True)
    yield "router of 384", False, partial(routed, 384, hashed=False)
    yield "permutation, 256 experts, width 4096", True, partial(moved, 256, 4096)
    yield "permutation, 384 experts, width 7168", False, partial(moved, 384, 7168)
