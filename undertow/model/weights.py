"""Every parameter of a model by name and shape, without torch: what the module tree holds, in the same names."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Literal, NamedTuple

from undertow.config.model import ModelConfig

Split = Literal["whole", "tensor", "experts"]
"""How ranks share a tensor: every one holds it `whole`, tensor parallelism cuts it, or expert parallelism deals its
experts out."""

Stored = Literal["bf16", "fp8", "fp4", "fp32"]
"""Type in the released checkpoint (model card 9)."""


class Weight(NamedTuple):
    """One parameter: its name within its place, its shape as in the module tree, how ranks share it, its type in the
    release, and whether it is a matrix that Muon updates, where it is used."""

    name: str
    shape: tuple[int, ...]
    split: Split = "whole"
    stored: Stored = "bf16"
    muon: bool = False

    @property
    def high(self) -> bool:
        """Whether it stays float32 whatever the model's type."""
        return self.stored == "fp32"

    @property
    def elements(self) -> int:
        """Number of values."""
        return prod(self.shape)


def _matrix(name: str, *shape: int, split: Split = "whole", stored: Stored = "bf16") -> Weight:
    return Weight(name, shape, split, stored, muon=True)


def _norm(name: str, width: int) -> Weight:
    return Weight(f"{name}.weight", (width,))


def _mixer(name: str, rows: int, scales: int, config: ModelConfig) -> Iterator[Weight]:
    yield _matrix(f"{name}.fn", rows, config.hc_mult * config.hidden_size, stored="fp32")
    yield Weight(f"{name}.base", (rows,), stored="fp32")
    yield Weight(f"{name}.scale", (scales,), stored="fp32")


def collapse_weights(config: ModelConfig) -> tuple[Weight, ...]:
    """A head collapse and the norm after it: the trunk's, and one in each MTP block."""
    return (*_mixer("hc_head", config.hc_mult, 1, config), _norm("norm", config.hidden_size))


def table_weight(config: ModelConfig, name: Literal["embed", "head"]) -> Weight:
    """The embedding, or the LM head: AdamW's."""
    return Weight(f"{name}.weight", (config.vocab_size, config.hidden_size), "tensor")


def _compressor(name: str, ratio: int, width: int, halves: int, d: int) -> Iterator[Weight]:
    yield Weight(f"{name}.ape", (ratio, halves * width), stored="fp32")
    yield _matrix(f"{name}.wkv.weight", halves * width, d)
    yield _matrix(f"{name}.wgate.weight", halves * width, d)
    yield _norm(f"{name}.norm", width)


def indexer_weights(config: ModelConfig) -> Iterator[Weight]:
    """The indexer of one CSA layer: tensor parallelism cuts its heads, its keys are whole on every rank."""
    d, width, heads, latent = config.hidden_size, config.index_head_dim, config.index_n_heads, config.q_lora_rank
    if config.indexer == "own_rank":
        latent = width
        yield _matrix("attn.indexer.wq_a.weight", width, d, stored="fp8")
    yield _matrix("attn.indexer.wq_b.weight", heads * width, latent, split="tensor", stored="fp8")
    yield _matrix("attn.indexer.weights_proj.weight", heads, d, split="tensor")
    yield from _compressor("attn.indexer.compressor", config.csa_ratio, width, 2, d)


def _attention(config: ModelConfig, layer: int) -> Iterator[Weight]:
    d, heads, width, kind = config.hidden_size, config.num_attention_heads, config.head_dim, config.kind(layer)
    up = config.o_groups * config.o_lora_rank
    yield Weight("attn.attn_sink", (heads,), "tensor", "fp32")
    yield _matrix("attn.wq_a.weight", config.q_lora_rank, d, stored="fp8")
    yield _norm("attn.q_norm", config.q_lora_rank)
    yield _matrix("attn.wq_b.weight", heads * width, config.q_lora_rank, split="tensor", stored="fp8")
    yield _matrix("attn.wkv.weight", width, d, stored="fp8")
    yield _norm("attn.kv_norm", width)
    yield _matrix("attn.wo_a.weight", up, heads * width // config.o_groups, split="tensor", stored="fp8")
    yield _matrix("attn.wo_b.weight", d, up, split="tensor", stored="fp8")
    if kind != "swa":
        yield from _compressor("attn.compressor", config.compress_ratios[layer], width, 2 if kind == "csa" else 1, d)
    if kind == "csa":
        yield from indexer_weights(config)


def _moe(config: ModelConfig) -> Iterator[Weight]:
    d, inner, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    yield _matrix("ffn.gate.weight", experts, d)
    yield _matrix("ffn.experts.w13", experts, 2 * inner, d, split="experts", stored="fp4")
    yield _matrix("ffn.experts.w2", experts, d, inner, split="experts", stored="fp4")
    yield _matrix("ffn.shared_experts.w1.weight", inner, d, split="tensor", stored="fp8")
    yield _matrix("ffn.shared_experts.w3.weight", inner, d, split="tensor", stored="fp8")
    yield _matrix("ffn.shared_experts.w2.weight", d, inner, split="tensor", stored="fp8")


def layer_weights(config: ModelConfig, layer: int) -> tuple[Weight, ...]:
    """One layer; the MTP block is layer `num_hidden_layers`, with its projections, norms and head collapse."""
    d, n = config.hidden_size, config.hc_mult
    weights = [
        *_mixer("hc_attn", (2 + n) * n, 3, config),
        _norm("attn_norm", d),
        *_attention(config, layer),
        *_mixer("hc_ffn", (2 + n) * n, 3, config),
        _norm("ffn_norm", d),
        *_moe(config),
    ]
    if layer >= config.num_hidden_layers:
        weights += [_matrix(f"{name}.weight", d, d, stored="fp8") for name in ("e_proj", "h_proj")]
        weights += [_norm("enorm", d), _norm("hnorm", d), *collapse_weights(config)]
    return tuple(weights)


def all_weights(config: ModelConfig) -> Iterator[Weight]:
    """The whole model, in the full names of the module tree."""
    yield table_weight(config, "embed")
    depth = config.num_hidden_layers
    for layer in range(depth + config.num_nextn_predict_layers):
        prefix = f"layers.{layer}" if layer < depth else f"mtp.{layer - depth}"
        for weight in layer_weights(config, layer):
            yield weight._replace(name=f"{prefix}.{weight.name}")
    yield from collapse_weights(config)
    yield table_weight(config, "head")
