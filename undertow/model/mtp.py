"""Multi-token prediction (model card 7): one block that predicts token `t + 2` from the trunk's streams and token `t
+ 1`."""

from __future__ import annotations

from torch import Tensor

from undertow.config.model import ModelConfig
from undertow.model.block import Block
from undertow.model.cache import LayerCache
from undertow.model.context import Context
from undertow.model.hyper import HyperHead
from undertow.model.layers import Linear, RMSNorm
from undertow.model.router import Routing
from undertow.ops import Ops


class MTPBlock(Block):
    """A sliding-window block fed with `e_proj(enorm(embed(next)))`, broadcast over streams, + `h_proj(hnorm(streams))`.

    Embedding and LM head are the model's; the head collapse and final norm are its own.
    """

    def __init__(self, config: ModelConfig, index: int, ops: Ops):
        super().__init__(config, config.num_hidden_layers + index, ops)
        d, eps = config.hidden_size, config.rms_norm_eps
        self.e_proj, self.h_proj = Linear(d, d, ops), Linear(d, d, ops)
        self.enorm, self.hnorm = RMSNorm(d, eps, ops), RMSNorm(d, eps, ops)
        self.hc_head = HyperHead(config, ops)
        self.norm = RMSNorm(d, eps, ops)

    def fuse(self, streams: Tensor, next_embedding: Tensor) -> Tensor:
        """`streams [T, n, d]` of the trunk before its head collapse, `next_embedding [T, d]` -> `[T, n, d]`."""
        return self.h_proj(self.hnorm(streams)) + self.e_proj(self.enorm(next_embedding))[:, None]

    def draft(
        self, streams: Tensor, next_embedding: Tensor, context: Context, cache: LayerCache, replay: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Routing]:
        """Normed hidden `[T, d]` ready for the LM head, the block's streams for deeper drafts, and the routing."""
        layer = self(self.fuse(streams, next_embedding), context, cache, replay)
        return self.hc_head(layer.streams, self.norm.weight), layer.streams, layer.routing
