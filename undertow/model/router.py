"""Routers (model card 6): which experts a token uses, by learned score or by token id, and with what weight."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from undertow.config.model import ModelConfig
from undertow.ops import Ops


class Routing(NamedTuple):
    """Decision of one MoE layer: `indices [T, K]`, `weights [T, K]`, and `scores [T, E]` of all experts, float32."""

    indices: Tensor
    weights: Tensor
    scores: Tensor


class Router(nn.Module):
    """Scores every expert in float32. A hash layer takes the choice from `tid2eid[token id]`, others from score +
    `bias`.

    `bias` is a buffer: it balances load between optimiser steps, not by gradient. With `uniform` set, either kind takes
    `uniform_choices`, for measurements of speed.
    """

    tid2eid: Tensor
    bias: Tensor

    def __init__(self, config: ModelConfig, hashed: bool, ops: Ops):
        super().__init__()
        self.ops, self.config, self.hashed = ops, config, hashed
        self.uniform = False
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        if hashed:
            shape = config.vocab_size, config.num_experts_per_tok
            self.register_buffer("tid2eid", torch.zeros(shape, dtype=torch.int64))
        else:
            self.register_buffer("bias", torch.zeros(config.n_routed_experts, dtype=torch.float32))

    def forward(self, x: Tensor, ids: Tensor, replay: Tensor | None = None) -> Routing:
        """`x [T, d]`, `ids [T]`; `replay [T, K]` forces a recorded choice, weights still follow today's scores."""
        config = self.config
        if replay is None and self.uniform:
            replay = uniform_choices(len(x), config.num_experts_per_tok, config.n_routed_experts, x.device)
        logits = self.ops.wide_linear(x, self.weight)
        chosen = replay if replay is not None else self.tid2eid[ids] if self.hashed else None
        bias = None if self.hashed else self.bias
        return Routing(*self.ops.route(logits, bias, config.num_experts_per_tok, config.routed_scaling_factor, chosen))


def uniform_choices(tokens: int, k: int, experts: int, device: torch.device | str = "cpu") -> Tensor:
    """Choices `[tokens, k]` that load every expert alike, to within one row.

    Choices of all tokens in turn count through the experts; a token's are distinct if `k <= experts`.
    """
    return torch.arange(tokens * k, device=device).remainder(experts).view(tokens, k)
