"""Hyper-connections (model card 5): several residual streams around one-stream sub-layers."""

from __future__ import annotations

from torch import Tensor, nn

from undertow.config.model import ModelConfig
from undertow.model.layers import float32_parameter
from undertow.ops import Ops


class HyperConnection(nn.Module):
    """Stream weights of one sub-layer: what flows in (pre), out (post) and on (mix)."""

    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__()
        self.ops, self.config = ops, config
        n = config.hc_mult
        self.fn = float32_parameter((2 + n) * n, n * config.hidden_size)
        self.base = float32_parameter((2 + n) * n)
        self.scale = float32_parameter(3)

    def forward(self, streams: Tensor, norm_weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`streams [T, n, d]` -> the sub-layer's input `[T, d]`, normalised with `norm_weight [d]`, post `[T, n]`, mix
        `[T, n, n]`, and the streams as `hyper_expand` takes them."""
        config = self.config
        return self.ops.hyper_in(
            streams, self.fn, self.scale, self.base, norm_weight,
            config.rms_norm_eps, config.hc_sinkhorn_iters, config.hc_eps,
        )  # fmt: skip


class HyperHead(nn.Module):
    """Final collapse of the streams: `sum_j (sigmoid(scale a_j + base_j) + eps) X_j`, without Sinkhorn; its norm."""

    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__()
        self.ops, self.config = ops, config
        self.fn = float32_parameter(config.hc_mult, config.hc_mult * config.hidden_size)
        self.base = float32_parameter(config.hc_mult)
        self.scale = float32_parameter(1)

    def forward(self, streams: Tensor, norm_weight: Tensor) -> Tensor:
        """`streams [T, n, d]` -> their sum `[T, d]`, normalised with `norm_weight [d]`."""
        config = self.config
        return self.ops.hyper_head(
            streams, self.fn, self.scale, self.base, norm_weight, config.rms_norm_eps, config.hc_eps
        )
