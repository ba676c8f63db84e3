"""The DeepSeek-V4 model: embedding, layers over residual streams, head collapse, LM head, and the MTP block."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from undertow.config.errors import InputError
from undertow.config.model import ModelConfig
from undertow.model.batch import flatten
from undertow.model.block import Block, Layer
from undertow.model.cache import Cache, ContiguousCache, NoCache
from undertow.model.context import Context, Indexing
from undertow.model.hyper import HyperHead
from undertow.model.layers import FLOAT32_PARAMETERS, RMSNorm
from undertow.model.modules import MODULES, WITHIN_MOE, Again, modules_of
from undertow.model.mtp import MTPBlock
from undertow.model.part import Part
from undertow.model.recompute import recomputed
from undertow.model.remake import remaking
from undertow.model.router import Routing
from undertow.ops import Ops
from undertow.ops.segments import Segments


class Output(NamedTuple):
    """`logits [B, S, V]` float32 and `mtp_logits [B, S, V]`, the MTP block's prediction of the token after the next.

    Padding holds zeros; so do MTP logits of each document's last token, which has no next token to read.
    """

    logits: Tensor
    mtp_logits: Tensor


class Trunk(NamedTuple):
    """Result of the layers: `streams [T, n, d]` before the head collapse, and each layer's routing decision.

    One per CSA layer, if `Indexing` asks for them: `distillation`, KL in nats of each token `[T]`, and `recall`, `[2]`
    int64, how many of the heaviest entries the indexer chose and of how many.
    """

    streams: Tensor
    routes: list[Routing]
    distillation: list[Tensor]
    recall: list[Tensor]

    def after(self, layer: Layer) -> Trunk:
        """With one layer more."""
        distillation, recall = layer.indexed.distillation, layer.indexed.recall
        return Trunk(
            layer.streams,
            [*self.routes, layer.routing],
            self.distillation if distillation is None else [*self.distillation, distillation],
            self.recall if recall is None else [*self.recall, recall],
        )


class Drafted(NamedTuple):
    """The MTP block on whole documents: every token but each document's last.

    `hidden [T', d]` for the LM head, the documents that remain, the flat `rows [T']` of their tokens, and the block's
    routing decision.
    """

    hidden: Tensor
    segments: Segments
    rows: Tensor
    routing: Routing


class Table(nn.Module):
    """A `[V, d]` matrix: the embedding, or the LM head."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))


class Transformer(nn.Module):
    """One module tree for training, rollout and serving; they differ by cache and operator table only.

    Parameters are left uninitialised (`build_model` and `load_model` fill them); `dtype` leaves the float32 islands
    alone. Everything below `forward` works on flat tokens `[T]` of documents described by `Segments`. With a `part` it
    holds that part of the modules alone, under the names that they have in the whole model; `through` runs its layers.
    """

    embed: Table
    hc_head: HyperHead
    norm: RMSNorm
    head: Table

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        part: Part | None = None,
    ):
        super().__init__()
        device = torch.device(device or "cpu")
        with torch.device("meta"):
            self._construct(config, ops or Ops(device=device), part or Part.whole(config))
        for name, parameter in self.named_parameters():
            island = name.rpartition(".")[2] in FLOAT32_PARAMETERS
            parameter.data = parameter.data.to(torch.float32 if island else dtype or torch.get_default_dtype())
        if device.type != "meta":
            self.to_empty(device=device)
            for buffer in self.buffers():
                buffer.zero_()

    def _construct(self, config: ModelConfig, ops: Ops, part: Part) -> None:
        self.config, self.ops, self.part = config, ops, part
        if part.embedding or part.mtp:
            self.embed = Table(config)
        self.layers = nn.ModuleList()
        for layer in part.layers:
            self.layers.add_module(str(layer), Block(config, layer, ops))
        if part.head:
            self.hc_head = HyperHead(config, ops)
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        if part.head or part.mtp:
            self.head = Table(config)
        blocks = config.num_nextn_predict_layers if part.mtp else 0
        self.mtp = nn.ModuleList(MTPBlock(config, index, ops) for index in range(blocks))

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """That of its matrices and streams, beside which some parameters are float32."""
        named = self.named_parameters()
        return next(p.dtype for name, p in named if name.rpartition(".")[2] not in FLOAT32_PARAMETERS)

    def new_cache(self, sequences: int) -> ContiguousCache:
        """An empty cache for that many documents."""
        return ContiguousCache(self.config.num_hidden_layers, sequences, self.config.num_nextn_predict_layers)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
        segment_ids: Tensor | None = None,
        cache: Cache | None = None,
        return_mtp: bool = False,
    ) -> Tensor | Output:
        """Logits `[B, S, V]` float32 of `input_ids [B, S]`; with `return_mtp` an `Output`.

        `attention_mask` (0 = padding, anywhere), `segment_ids` (packed documents) and `positions` are `[B, S]`, see
        `undertow.model.batch.flatten`. `cache` (from `new_cache`) holds the tokens before these, one document a row,
        and is advanced. Raises `InputError` for ids outside the vocabulary or documents beyond
        `max_position_embeddings`.
        """
        past = None if cache is None else cache.lengths
        batch = flatten(input_ids, self.config.vocab_size, attention_mask, positions, segment_ids, past)
        if return_mtp and cache is not None:
            raise InputError("return_mtp with a cache: the next tokens are not known yet; call model.draft with them")
        if return_mtp:
            self._require_mtp()
        trunk = self.trunk(batch.ids, batch.segments, cache)
        logits = batch.spread(self.logits(self.collapse(trunk.streams)))
        if not return_mtp:
            return logits
        drafted = self.mtp_hidden(trunk.streams, batch.ids, batch.segments)
        full = torch.zeros_like(logits).flatten(0, 1)
        place = drafted.rows if batch.place is None else batch.place[drafted.rows]
        return Output(logits, full.index_copy(0, place, self.logits(drafted.hidden)).view_as(logits))

    def trunk(
        self,
        ids: Tensor,
        segments: Segments,
        cache: Cache | None = None,
        replay: Sequence[Tensor] | None = None,
        indexing: Indexing | None = None,
        recompute: Collection[Again] = (),
    ) -> Trunk:
        """All layers on flat `ids [T]`; `replay` gives each layer a recorded expert choice `[T, K]`.

        `indexing` says how CSA layers choose entries and what to compute for their indexers. `recompute` are the
        numbers of layers that keep only their input for the backward pass and repeat the rest in it, with the same
        choices of experts and entries, and pairs of a layer and a module that does so. Raises `InputError` for too long
        a document, and for `recompute` with a cache, of a layer or module that is not there, or of one twice.
        """
        context = self.context(ids, segments, indexing)
        self.check_recompute(recompute, cache)
        if cache is not None:
            cache.begin(segments, "trunk")
        trunk = self.through(self.part.layers, self.embedded(ids), context, cache, replay, recompute)
        if cache is not None:
            cache.advance(segments, "trunk")
        return trunk

    def context(self, ids: Tensor, segments: Segments, indexing: Indexing | None = None) -> Context:
        """What layers share in one pass over `ids [T]`. Raises `InputError` for too long a document."""
        longest = max((p + n for p, n in zip(segments.past, segments.new, strict=True)), default=0)
        if longest > self.config.max_position_embeddings:
            raise InputError(
                f"a document of {longest} tokens exceeds max_position_embeddings "
                f"{self.config.max_position_embeddings}: shorten it"
            )
        return Context(self.config, ids, segments, indexing)

    def embedded(self, ids: Tensor) -> Tensor:
        """`ids [T]` -> the streams that the first layer reads `[T, n, d]`, all the same."""
        return F.embedding(ids, self.embed.weight)[:, None].expand(-1, self.config.hc_mult, -1)

    def through(
        self,
        layers: Sequence[int],
        streams: Tensor,
        context: Context,
        cache: Cache | None = None,
        replay: Sequence[Tensor] | None = None,
        recompute: Collection[Again] = (),
    ) -> Trunk:
        """Some layers, by their numbers in the model, one after the other on `streams [T, n, d]`; see `trunk`."""
        trunk = Trunk(streams, [], [], [])
        for index in layers:
            block = self.layers.get_submodule(str(index))
            layer_cache = NoCache() if cache is None else cache.layer(index)
            run = partial(block, context=context, cache=layer_cache, replay=None if replay is None else replay[index])
            again = index in recompute and torch.is_grad_enabled()
            with remaking(modules_of(recompute, index)) as modules:
                whole = partial(recomputed, run) if again else partial(run, again=modules)
                trunk = trunk.after(whole(trunk.streams))
        return trunk

    def check_recompute(self, recompute: Collection[Again], cache: Cache | None = None) -> None:
        """Raises `InputError` for what `trunk` cannot recompute."""
        pairs = [each for each in recompute if isinstance(each, tuple)]
        layers = sorted({each if isinstance(each, int) else each[0] for each in recompute})
        if recompute and cache is not None:
            raise InputError(f"recompute of layers {layers} with a cache: training has none; leave out either")
        for layer in layers:
            if not 0 <= layer < self.config.num_hidden_layers:
                last = self.config.num_hidden_layers - 1
                raise InputError(f"recompute names layer {layer}: the trunk has layers 0 to {last}")
        for layer, module in pairs:
            if module not in MODULES:
                raise InputError(f"recompute names module '{module}' of layer {layer}: known are {', '.join(MODULES)}")
            if layer in recompute or (module in WITHIN_MOE and (layer, "moe") in recompute):
                more = "the layer" if layer in recompute else "its moe"
                raise InputError(f"recompute names {module} of layer {layer} and {more}, which contains it; name one")

    def collapse(self, streams: Tensor) -> Tensor:
        """Streams `[T, n, d]` -> normed hidden `[T, d]`, what the LM head reads."""
        return self.hc_head(streams, self.norm.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """LM head in float32: `[T, d] -> [T, V]`."""
        return self.ops.wide_linear(hidden, self.head.weight)

    def _require_mtp(self) -> MTPBlock:
        if not self.mtp:
            raise InputError("this model has no MTP block (num_nextn_predict_layers is 0)")
        return cast(MTPBlock, self.mtp[0])

    def draft(
        self, streams: Tensor, next_ids: Tensor, segments: Segments, cache: Cache | None = None
    ) -> tuple[Tensor, Tensor]:
        """MTP block on trunk `streams [T, n, d]` and the tokens that follow, `next_ids [T]`.

        Returns hidden `[T, d]` (through `logits`: the token after the next) and the block's own streams. With a cache,
        `segments` counts the tokens this block has seen (`cache.draft_lengths`).
        """
        return self._draft(streams, next_ids, segments, cache)[:2]

    def _draft(
        self, streams: Tensor, next_ids: Tensor, segments: Segments, cache: Cache | None = None
    ) -> tuple[Tensor, Tensor, Routing]:
        block = self._require_mtp()
        if cache is not None:
            cache.begin(segments, "mtp")
        layer_cache = NoCache() if cache is None else cache.layer(self.config.num_hidden_layers)
        embedding = F.embedding(next_ids, self.embed.weight)
        drafted = block.draft(streams, embedding, Context(self.config, next_ids, segments), layer_cache)
        if cache is not None:
            cache.advance(segments, "mtp")
        return drafted

    def mtp_hidden(self, streams: Tensor, ids: Tensor, segments: Segments) -> Drafted:
        """The MTP block on the trunk's `streams [T, n, d]` and `ids [T]` of whole documents."""
        shorter, rows = segments.without_last()
        hidden, _, routing = self._draft(streams[rows], ids[rows + 1], shorter)
        return Drafted(hidden, shorter, rows, routing)
