"""Expert parallelism: tokens go to the ranks that hold their experts by all-to-all, and come back as weighted rows.

Every rank takes part in every exchange, forward and backward, in one fixed order, however few tokens it has: none of
them depends on what a rank chose. No token is dropped, there is no capacity.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from undertow.model.moe import Experts
from undertow.model.router import Routing


def _exchange(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start to send `rows [N, ...]`, `send[r]` of them to rank `r`, and to receive `receive[r]` from it."""
    result = rows.new_empty(sum(receive), *rows.shape[1:])
    work = dist.all_to_all_single(result, rows.contiguous(), receive, send, group=group, async_op=True)
    assert work is not None  # only for a rank outside the group
    return result, work


class _Send(torch.autograd.Function):
    """Rows with their weights. One function for both, so that its backward pass sends both, always in this order."""

    @staticmethod
    def forward(ctx, rows: Tensor, weights: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup):
        ctx.route = receive, send, group
        return _both(rows, weights, send, receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, rows: Tensor, weights: Tensor):  # type: ignore[override]
        return *_both(rows, weights, *ctx.route), None, None, None


def _both(rows: Tensor, weights: Tensor, *route) -> tuple[Tensor, Tensor]:
    (far_rows, first), (far_weights, second) = _exchange(rows, *route), _exchange(weights, *route)
    first.wait()
    second.wait()
    return far_rows, far_weights


class _Return(torch.autograd.Function):
    """Rows alone, back to where they came from."""

    @staticmethod
    def forward(ctx, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.route = receive, send, group
        result, work = _exchange(rows, send, receive, group)
        work.wait()
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        result, work = _exchange(grad, *ctx.route)
        work.wait()
        return result, None, None, None


class AllToAll:
    """A dispatcher for `MoE` whose experts are dealt out over `group`, rank `r` holding the `r`-th slice of them.

    Rows that reach a rank are put in order of expert, then of the rank and token they come from, so that an expert sees
    the tokens of the ranks as one process would see them end to end.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.ranks = group, dist.get_world_size(group)

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """Rows for each expert, `counts [E]` int64, told to those who hold them -> `[ranks, E / ranks]`: rows of each
        rank for each expert here."""
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts.contiguous(), group=self.group)
        return theirs.view(self.ranks, -1)

    def __call__(self, x: Tensor, routing: Routing, experts: Experts) -> Tensor:
        """`x [T, d]`, `routing` over all experts, `experts` the local slice -> `[T, d]` float32."""
        ops, local = experts.ops, experts.w13.shape[0]
        order = ops.dispatch_order(routing.indices, local * self.ranks)
        theirs = self.exchange_counts(order.counts)
        # The one wait of the host: sizes of what is sent and received must be known to it.
        send, receive = torch.stack([order.counts.view(self.ranks, local).sum(1), theirs.sum(1)]).tolist()
        weights = ops.permute_weights(routing.weights, order)
        rows, weights = _Send.apply(ops.permute(x, order), weights, send, receive, self.group)
        owner = torch.arange(local, device=x.device).repeat(self.ranks)
        owner = owner.repeat_interleave(theirs.flatten(), output_size=sum(receive))
        here = ops.dispatch_order(owner[:, None], local)
        weights = ops.permute_weights(weights[:, None], here)
        result = experts(ops.permute(rows, here), weights, here.counts)
        result = ops.unpermute(result, here).to(result.dtype)  # one row each: exact
        return ops.unpermute(_Return.apply(result, receive, send, self.group), order)
