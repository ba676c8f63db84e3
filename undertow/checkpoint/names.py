"""Tensor names of the three model formats as tables, and the maps between them. No torch, no model is built.

`undertow` is what `Transformer.state_dict()` says; `released` is the published checkpoint, one tensor an expert matrix;
`transformers` is its state dict, experts stacked, MTP blocks (which it ignores) under their released names. Three more
are only read, because transformers 5.23's `save_pretrained` writes them: `exported`, released names half restored,
`resaved`, from a model that was loaded under its own names, where `kv_norm` has become `norm`, and `blended`, from one
that was loaded under its own names beside an MTP block: `exported`, but compressors, indexers and head nearly its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from undertow.config.model import ModelConfig

Format = Literal["undertow", "released", "transformers", "exported", "resaved", "blended"]
Kind = Literal["weight", "float32", "index"]

FORMATS: tuple[Format, ...] = ("undertow", "released", "transformers", "exported", "resaved", "blended")


class Expected(NamedTuple):
    """A tensor as the configuration wants it: `weight` has the model's dtype, `float32` always that, `index` int64."""

    shape: tuple[int, ...]
    kind: Kind


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of a file: its name, and its place in a native tensor (`()` is all of it)."""

    name: str
    shape: tuple[int, ...]
    place: tuple[int | slice, ...] = ()

    def view(self, tensor: Any) -> Any:
        """The part of the native `tensor` (of any array library) that this piece holds."""
        return tensor[self.place] if self.place else tensor


# Inside a block: native name -> released name, transformers name. Experts are apart, they change shape.
BLOCK: dict[str, tuple[str, str]] = {
    "attn_norm.weight": ("attn_norm.weight", "input_layernorm.weight"),
    "ffn_norm.weight": ("ffn_norm.weight", "post_attention_layernorm.weight"),
    "hc_attn.fn": ("hc_attn_fn", "attn_hc.fn"),
    "hc_attn.base": ("hc_attn_base", "attn_hc.base"),
    "hc_attn.scale": ("hc_attn_scale", "attn_hc.scale"),
    "hc_ffn.fn": ("hc_ffn_fn", "ffn_hc.fn"),
    "hc_ffn.base": ("hc_ffn_base", "ffn_hc.base"),
    "hc_ffn.scale": ("hc_ffn_scale", "ffn_hc.scale"),
    "attn.wq_a.weight": ("attn.wq_a.weight", "self_attn.q_a_proj.weight"),
    "attn.q_norm.weight": ("attn.q_norm.weight", "self_attn.q_a_norm.weight"),
    "attn.wq_b.weight": ("attn.wq_b.weight", "self_attn.q_b_proj.weight"),
    "attn.wkv.weight": ("attn.wkv.weight", "self_attn.kv_proj.weight"),
    "attn.kv_norm.weight": ("attn.kv_norm.weight", "self_attn.kv_norm.weight"),
    "attn.wo_a.weight": ("attn.wo_a.weight", "self_attn.o_a_proj.weight"),
    "attn.wo_b.weight": ("attn.wo_b.weight", "self_attn.o_b_proj.weight"),
    "attn.attn_sink": ("attn.attn_sink", "self_attn.sinks"),
    "attn.compressor.wkv.weight": ("attn.compressor.wkv.weight", "self_attn.compressor.kv_proj.weight"),
    "attn.compressor.wgate.weight": ("attn.compressor.wgate.weight", "self_attn.compressor.gate_proj.weight"),
    "attn.compressor.ape": ("attn.compressor.ape", "self_attn.compressor.position_bias"),
    "attn.compressor.norm.weight": ("attn.compressor.norm.weight", "self_attn.compressor.kv_norm.weight"),
    "attn.indexer.wq_a.weight": ("attn.indexer.wq_a.weight", "self_attn.compressor.indexer.q_a_proj.weight"),
    "attn.indexer.wq_b.weight": ("attn.indexer.wq_b.weight", "self_attn.compressor.indexer.q_b_proj.weight"),
    "attn.indexer.weights_proj.weight": (
        "attn.indexer.weights_proj.weight",
        "self_attn.compressor.indexer.scorer.weights_proj.weight",
    ),
    "attn.indexer.compressor.wkv.weight": (
        "attn.indexer.compressor.wkv.weight",
        "self_attn.compressor.indexer.kv_proj.weight",
    ),
    "attn.indexer.compressor.wgate.weight": (
        "attn.indexer.compressor.wgate.weight",
        "self_attn.compressor.indexer.gate_proj.weight",
    ),
    "attn.indexer.compressor.ape": ("attn.indexer.compressor.ape", "self_attn.compressor.indexer.position_bias"),
    "attn.indexer.compressor.norm.weight": (
        "attn.indexer.compressor.norm.weight",
        "self_attn.compressor.indexer.kv_norm.weight",
    ),
    "ffn.gate.weight": ("ffn.gate.weight", "mlp.gate.weight"),
    "ffn.gate.bias": ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
    "ffn.gate.tid2eid": ("ffn.gate.tid2eid", "mlp.gate.tid2eid"),
    "ffn.shared_experts.w1.weight": ("ffn.shared_experts.w1.weight", "mlp.shared_experts.gate_proj.weight"),
    "ffn.shared_experts.w3.weight": ("ffn.shared_experts.w3.weight", "mlp.shared_experts.up_proj.weight"),
    "ffn.shared_experts.w2.weight": ("ffn.shared_experts.w2.weight", "mlp.shared_experts.down_proj.weight"),
}

# Outside the blocks: native name -> released, transformers, exported name.
TOP: dict[str, tuple[str, str, str]] = {
    "embed.weight": ("embed.weight", "model.embed_tokens.weight", "model.embed_tokens.weight"),
    "norm.weight": ("norm.weight", "model.norm.weight", "model.norm.weight"),
    "head.weight": ("head.weight", "lm_head.weight", "head.weight"),
    "hc_head.fn": ("hc_head_fn", "model.hc_head.hc_fn", "model.hc_head.hc_fn"),
    "hc_head.base": ("hc_head_base", "model.hc_head.hc_base", "model.hc_head.hc_base"),
    "hc_head.scale": ("hc_head_scale", "model.hc_head.hc_scale", "model.hc_head.hc_scale"),
}

# Only in MTP blocks: native name -> released name.
MTP: dict[str, str] = {
    "e_proj.weight": "e_proj.weight",
    "h_proj.weight": "h_proj.weight",
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "norm.weight": "norm.weight",
    "hc_head.fn": "hc_head_fn",
    "hc_head.base": "hc_head_base",
    "hc_head.scale": "hc_head_scale",
}

EXPERTS: dict[str, tuple[tuple[str, ...], str]] = {
    "ffn.experts.w13": (("w1", "w3"), "mlp.experts.gate_up_proj"),
    "ffn.experts.w2": (("w2",), "mlp.experts.down_proj"),
}
"""Native name -> the released matrices stacked in it along the rows of each expert, and the transformers name."""

# Released matrices in FP8 or FP4, each with a `.scale` beside its `.weight`.
_SCALED = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3", "e_proj", "h_proj")


def native_tensors(config: ModelConfig) -> dict[str, Expected]:
    """Every tensor of `Transformer(config).state_dict()` by name, buffers included, in the order of a forward pass."""
    width, streams = config.hidden_size, config.hc_mult
    tensors = {"embed.weight": Expected((config.vocab_size, width), "weight")}
    for layer in range(config.num_hidden_layers):
        tensors |= {f"layers.{layer}.{leaf}": tensor for leaf, tensor in _block(config, layer)}
    head = {
        "hc_head.fn": Expected((streams, streams * width), "float32"),
        "hc_head.base": Expected((streams,), "float32"),
        "hc_head.scale": Expected((1,), "float32"),
        "norm.weight": Expected((width,), "weight"),
    }
    tensors |= head
    tensors["head.weight"] = Expected((config.vocab_size, width), "weight")
    fusion = {name: Expected((width, width), "weight") for name in ("e_proj.weight", "h_proj.weight")}
    fusion |= {name: Expected((width,), "weight") for name in ("enorm.weight", "hnorm.weight")}
    for depth in range(config.num_nextn_predict_layers):
        block = dict(_block(config, config.num_hidden_layers + depth))
        tensors |= {f"mtp.{depth}.{leaf}": tensor for leaf, tensor in (fusion | block | head).items()}
    return tensors


def _block(config: ModelConfig, layer: int) -> Iterator[tuple[str, Expected]]:
    d, streams = config.hidden_size, config.hc_mult
    for part in ("hc_attn", "hc_ffn"):
        mixes = streams * streams + 2 * streams
        yield f"{part}.fn", Expected((mixes, streams * d), "float32")
        yield f"{part}.base", Expected((mixes,), "float32")
        yield f"{part}.scale", Expected((3,), "float32")
    yield "attn_norm.weight", Expected((d,), "weight")
    yield "ffn_norm.weight", Expected((d,), "weight")
    for leaf, tensor in _attention(config, layer):
        yield f"attn.{leaf}", tensor
    experts, inner = config.n_routed_experts, config.moe_intermediate_size
    yield "ffn.gate.weight", Expected((experts, d), "weight")
    if config.is_hash(layer):
        yield "ffn.gate.tid2eid", Expected((config.vocab_size, config.num_experts_per_tok), "index")
    else:
        yield "ffn.gate.bias", Expected((experts,), "float32")
    yield "ffn.experts.w13", Expected((experts, 2 * inner, d), "weight")
    yield "ffn.experts.w2", Expected((experts, d, inner), "weight")
    yield "ffn.shared_experts.w1.weight", Expected((inner, d), "weight")
    yield "ffn.shared_experts.w3.weight", Expected((inner, d), "weight")
    yield "ffn.shared_experts.w2.weight", Expected((d, inner), "weight")


def _attention(config: ModelConfig, layer: int) -> Iterator[tuple[str, Expected]]:
    d, heads, width = config.hidden_size, config.num_attention_heads, config.head_dim
    latent = config.o_groups * config.o_lora_rank
    yield "wq_a.weight", Expected((config.q_lora_rank, d), "weight")
    yield "q_norm.weight", Expected((config.q_lora_rank,), "weight")
    yield "wq_b.weight", Expected((heads * width, config.q_lora_rank), "weight")
    yield "wkv.weight", Expected((width, d), "weight")
    yield "kv_norm.weight", Expected((width,), "weight")
    yield "wo_a.weight", Expected((latent, heads * width // config.o_groups), "weight")
    yield "wo_b.weight", Expected((d, latent), "weight")
    yield "attn_sink", Expected((heads,), "float32")
    kind, ratio = config.kind(layer), config.compress_ratios[layer]
    if kind != "swa":
        # Windows of CSA overlap: each token gives one half to its own entry, the other to the next.
        for leaf, tensor in _compressor(d, width, ratio, halves=2 if kind == "csa" else 1):
            yield f"compressor.{leaf}", tensor
    if kind == "csa":
        index, rank = config.index_head_dim, config.q_lora_rank
        if config.indexer == "own_rank":
            rank = index
            yield "indexer.wq_a.weight", Expected((rank, d), "weight")
        yield "indexer.wq_b.weight", Expected((config.index_n_heads * index, rank), "weight")
        yield "indexer.weights_proj.weight", Expected((config.index_n_heads, d), "weight")
        for leaf, tensor in _compressor(d, index, ratio, halves=2):
            yield f"indexer.compressor.{leaf}", tensor


def _compressor(d: int, width: int, ratio: int, halves: int) -> Iterator[tuple[str, Expected]]:
    yield "wkv.weight", Expected((halves * width, d), "weight")
    yield "wgate.weight", Expected((halves * width, d), "weight")
    yield "ape", Expected((ratio, halves * width), "float32")
    yield "norm.weight", Expected((width,), "weight")


def pieces(native: str, shape: tuple[int, ...], spelling: Format) -> list[Piece]:
    """The tensors of a file in `spelling` that hold the native tensor `native` of `shape`."""
    if spelling == "undertow":
        return [Piece(native, shape)]
    if native in TOP:
        return [Piece(TOP[native][{"released": 0, "exported": 2}.get(spelling, 1)], shape)]
    stack, number, leaf = native.split(".", 2)
    prefix = f"{stack}.{number}." if spelling == "released" or stack == "mtp" else f"model.{stack}.{number}."
    own = spelling in ("transformers", "resaved") and stack == "layers"
    if leaf in EXPERTS and not own:
        return list(_split_experts(leaf, shape, prefix))
    if leaf in EXPERTS:
        name = EXPERTS[leaf][1]
    elif stack == "mtp" and leaf in MTP:
        name = MTP[leaf]
    elif spelling in ("exported", "blended") and stack == "layers" and leaf == "attn.kv_norm.weight":
        name = "attn.norm.weight"
    elif spelling == "blended" and stack == "layers" and leaf.startswith(("attn.compressor.", "attn.indexer.")):
        name = BLOCK[leaf][1].replace("self_attn.", "attn.").replace("kv_proj.", "wkv.").replace("kv_norm.", "norm.")
    else:
        name = BLOCK[leaf][1 if own else 0]
    if spelling == "resaved" and own:
        name = name.replace("kv_norm.", "norm.")
    return [Piece(prefix + name, shape)]


def _split_experts(leaf: str, shape: tuple[int, ...], prefix: str) -> Iterator[Piece]:
    matrices = EXPERTS[leaf][0]
    experts, rows, columns = shape
    rows //= len(matrices)
    for expert in range(experts):
        for position, matrix in enumerate(matrices):
            place = (expert, slice(position * rows, (position + 1) * rows))
            yield Piece(f"{prefix}ffn.experts.{expert}.{matrix}.weight", (rows, columns), place)


def expected_tensors(config: ModelConfig, spelling: Format) -> dict[str, Expected]:
    """Every tensor of an unquantised checkpoint of `config` in `spelling`, by its name in the files."""
    return {
        piece.name: Expected(piece.shape, tensor.kind)
        for native, tensor in native_tensors(config).items()
        for piece in pieces(native, tensor.shape, spelling)
    }


def native_places(config: ModelConfig, spelling: Format) -> dict[str, tuple[str, Piece]]:
    """The way back: a file's tensor name -> the native tensor it belongs to, and its place in it."""
    return {
        piece.name: (native, piece)
        for native, tensor in native_tensors(config).items()
        for piece in pieces(native, tensor.shape, spelling)
    }


def released_listing(config: ModelConfig) -> list[str]:
    """Names of the quantised release, scales included: 69,187 for Flash and 145,116 for Pro, as published."""
    names = []
    for name in expected_tensors(config, "released"):
        names.append(name)
        if is_scaled(name):
            names.append(scale_name(name))
    return names


def is_scaled(name: str) -> bool:
    """Whether the release holds the tensor, given by its released name, in FP8 or FP4."""
    owner, _, leaf = name.rpartition(".")
    return leaf == "weight" and owner.rpartition(".")[2] in _SCALED and ".compressor." not in name


def is_routed(name: str) -> bool:
    """Whether a released name is that of a routed expert's matrix, which the release holds in FP4."""
    return ".ffn.experts." in name


def scale_name(name: str) -> str:
    """The tensor that holds the scales of the weight `name`."""
    return name.removesuffix("weight") + "scale"


def detect_spelling(names: Iterable[str], config: ModelConfig) -> Format | None:
    """The format most of `names` belong to; None where no format explains half of them, or half of what it needs."""
    present = set(names)
    best: Format | None = None
    most = 0
    for spelling in FORMATS:
        expected = expected_tensors(config, spelling).keys()
        shared = len(present & expected)
        if shared > most and 2 * shared >= min(len(present), len(expected)):
            best, most = spelling, shared
    return best
