"""Parameter holders that every block uses: a bias-free linear map and RMSNorm, both computing through the operator
table."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from undertow.ops import Ops
from undertow.quant.quantised import Quantised

# Last part of the name of every parameter that `dtype` leaves alone: hyper-connections, positional gates, sinks.
FLOAT32_PARAMETERS = frozenset(("fn", "base", "scale", "ape", "attn_sink"))


class Linear(nn.Module):
    """`x [..., in] -> [..., out]`, no bias. `weight [out, in]`, a parameter, or codes for the forward pass alone."""

    def __init__(self, inputs: int, outputs: int, ops: Ops):
        super().__init__()
        self.ops = ops
        self.weight: nn.Parameter | Quantised = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, Quantised):
            return self.ops.linear_quantised(x, self.weight)
        return self.ops.linear(x, self.weight)


class RMSNorm(nn.Module):
    """`x [..., D] -> x / rms(x) * weight`, computed in float32."""

    def __init__(self, width: int, eps: float, ops: Ops):
        super().__init__()
        self.ops, self.eps = ops, eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)


def float32_parameter(*shape: int) -> nn.Parameter:
    """A parameter that stays float32 in a bfloat16 model; its name is one of `FLOAT32_PARAMETERS`."""
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32))
