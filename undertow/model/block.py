"""One layer (model card 5): an attention site, then a MoE site, each reading and writing the residual streams."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from undertow.config.model import ModelConfig
from undertow.model.attention import Attention, Indexed
from undertow.model.cache import LayerCache
from undertow.model.context import Context
from undertow.model.hyper import HyperConnection
from undertow.model.layers import RMSNorm
from undertow.model.moe import MoE
from undertow.model.recompute import Choices
from undertow.model.remake import Remake, kept
from undertow.model.router import Routing
from undertow.ops import Ops


class Layer(NamedTuple):
    """What a block makes: `streams [T, n, d]`, its routing decision, and what concerns its indexer."""

    streams: Tensor
    routing: Routing
    indexed: Indexed

    @property
    def choices(self) -> Choices:
        """The decisions taken on the way."""
        return Choices(self.routing.indices, self.indexed.selected)


class Block(nn.Module):
    """`streams [T, n, d] -> [T, n, d]`. The norm follows the collapse; each site computes its weights afresh."""

    def __init__(self, config: ModelConfig, layer: int, ops: Ops):
        super().__init__()
        self.ops, self.layer = ops, layer
        self.hc_attn = HyperConnection(config, ops)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.attn = Attention(config, layer, ops)
        self.hc_ffn = HyperConnection(config, ops)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.ffn = MoE(config, layer, ops)

    def forward(
        self,
        streams: Tensor,
        context: Context,
        cache: LayerCache,
        replay: Tensor | None = None,
        recorded: Choices | None = None,
        again: Remake = kept,
    ) -> Layer:
        """`replay [T, K]` forces a choice of experts, `recorded` all that an earlier run of the same call chose.
        `again` runs the layer's modules."""
        x, post, mix, streams = again("mixer_norm", self._into_attention, streams)
        y, indexed = self.attn(x, context, cache, recorded, again)
        streams = self.ops.hyper_expand(y, post, mix, streams)
        x, post, mix, streams = again("mixer_norm", self._into_experts, streams)
        y, routing = self.ffn(x, context.ids, replay if recorded is None else recorded.experts, again)
        return Layer(self.ops.hyper_expand(y, post, mix, streams), routing, indexed)

    def _into_attention(self, streams: Tensor) -> tuple[Tensor, ...]:
        return self.hc_attn(streams, self.attn_norm.weight)

    def _into_experts(self, streams: Tensor) -> tuple[Tensor, ...]:
        return self.hc_ffn(streams, self.ffn_norm.weight)
