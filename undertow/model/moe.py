"""Mixture of experts (model card 6): routed experts stored stacked, one shared expert, clamped SwiGLU in both."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from undertow.config.model import ModelConfig
from undertow.model.layers import Linear
from undertow.model.remake import Remake, kept
from undertow.model.router import Router, Routing
from undertow.ops import Ops
from undertow.quant.quantised import Quantised

# Sends tokens to experts and brings the weighted sum back: `(x [T, d], routing, experts) -> [T, d]`
# float32.
Dispatcher = Callable[[Tensor, Routing, "Experts"], Tensor]


class Experts(nn.Module):
    """Routed experts: `w13 [E, 2 I, d]` (gate rows, then up rows) and `w2 [E, d, I]`, parameters, or codes for the
    forward pass alone."""

    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__()
        self.ops, self.limit, self._again = ops, config.swiglu_limit, kept
        experts, inner, d = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.w13: nn.Parameter | Quantised = nn.Parameter(torch.empty(experts, 2 * inner, d))
        self.w2: nn.Parameter | Quantised = nn.Parameter(torch.empty(experts, d, inner))

    def forward(self, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """`rows [N, d]` in expert order, `weights [N]`, `counts [E]` -> `[N, d]`. Weights enter before `w2`, in
        float32."""
        both = self._product(rows, self.w13, counts)
        return self._product(self._again("expert_activation", self._activation, both, weights), self.w2, counts)

    def run_by(self, again: Remake) -> Experts:
        """The same experts, with their module run by `again`."""
        if again is kept:
            return self
        experts = object.__new__(type(self))  # FSDP2 makes `copy` construct another one
        experts.__dict__.update(self.__dict__)
        experts._again = again
        return experts

    def _activation(self, both: Tensor, weights: Tensor) -> Tensor:
        return self.ops.swiglu(both, None, self.limit, weights)

    def _product(self, rows: Tensor, weight: Tensor | Quantised, counts: Tensor) -> Tensor:
        if isinstance(weight, Quantised):
            return self.ops.grouped_linear_quantised(rows, weight, counts)
        return self.ops.grouped_linear(rows, weight, counts)


class SharedExpert(nn.Module):
    """The expert that every token uses, with weight 1."""

    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__()
        self.ops, self.limit = ops, config.swiglu_limit
        self.w1 = Linear(config.hidden_size, config.moe_intermediate_size, ops)
        self.w3 = Linear(config.hidden_size, config.moe_intermediate_size, ops)
        self.w2 = Linear(config.moe_intermediate_size, config.hidden_size, ops)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.ops.swiglu(self.w1(x), self.w3(x), self.limit))


def dispatch_locally(x: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """All experts on this device: permute, compute, sum each token's choices in float32."""
    ops = experts.ops
    order = ops.dispatch_order(routing.indices, experts.w13.shape[0])
    weights = ops.permute_weights(routing.weights, order)
    return ops.unpermute(experts(ops.permute(x, order), weights, order.counts), order)


class MoE(nn.Module):
    """Router, routed experts and shared expert. `dispatch` is where expert parallelism plugs in."""

    def __init__(self, config: ModelConfig, layer: int, ops: Ops, dispatch: Dispatcher = dispatch_locally):
        super().__init__()
        self.gate = Router(config, config.is_hash(layer), ops)
        self.experts = Experts(config, ops)
        self.shared_experts = SharedExpert(config, ops)
        self.dispatch = dispatch

    def forward(
        self, x: Tensor, ids: Tensor, replay: Tensor | None = None, again: Remake = kept
    ) -> tuple[Tensor, Routing]:
        """`x [T, d]` -> output `[T, d]` and the routing decision. `again` runs the modules: a second run takes the
        experts that the first one chose."""
        chosen = [] if replay is None else [replay]

        def run(x: Tensor) -> tuple[Tensor, ...]:
            routing = self.gate(x, ids, chosen[0] if chosen else None)
            if not chosen:
                chosen.append(routing.indices.contiguous())  # the reference's is a slice of all experts
            routed = self.dispatch(x, routing, self.experts.run_by(again))
            return (routed + again("shared_expert", self.shared_experts, x)).to(x.dtype), *routing

        y, *decision = again("moe", run, x)
        return y, Routing(*decision)
