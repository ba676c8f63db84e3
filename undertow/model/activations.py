"""Bytes that one forward pass keeps for its backward pass, in closed form: of the reference operators, or of kernels on
a GPU, which keep less.

Counted is every storage that autograd holds through a saved tensor, once, however many tensors or views of it are
saved; parameters and buffers are left out. What operators hold beside saved tensors (dispatch orders, selections) is
apart, in `held_beside`. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from undertow.config.model import ModelConfig
from undertow.config.training import RecomputeModule
from undertow.model.modules import Again, frees, modules_of

Dtype = Literal["float32", "bfloat16"]

_F32, _I32, _I64 = 4, 4, 8


class Term(NamedTuple):
    """`bytes` kept under a name by one module at one place: a layer, the embedding, the head, the MTP block.
    `freed_by`: the modules any of which frees them if it is computed again."""

    place: str
    module: str
    name: str
    bytes: int
    freed_by: frozenset[RecomputeModule] = frozenset()


@dataclass(frozen=True)
class Pass:
    """One forward pass: a model in a type, on whole documents of the given lengths in tokens. `kernels`: every operator
    that has a kernel runs in it."""

    config: ModelConfig
    documents: tuple[int, ...]
    dtype: Dtype
    kernels: bool = False

    @cached_property
    def tokens(self) -> int:
        """Rows of the flat axis."""
        return sum(self.documents)

    @property
    def width(self) -> int:
        """Bytes of one activation."""
        return 2 if self.dtype == "bfloat16" else 4

    def cast(self, elements: int) -> int:
        """Bytes of a float32 copy: nothing where activations are float32 already."""
        return elements * _F32 if self.dtype == "bfloat16" else 0

    def groups(self, ratio: int) -> int:
        """Groups of `ratio` tokens, open ones included."""
        return sum(-(-n // ratio) for n in self.documents)

    def entries(self, ratio: int) -> int:
        """Complete groups: compressed entries."""
        return sum(n // ratio for n in self.documents)

    @property
    def selects(self) -> bool:
        """Whether some CSA query sees more entries than it keeps."""
        return max(self.documents, default=0) // self.config.csa_ratio > self.config.index_topk

    def without_last(self) -> Pass:
        """The documents that the MTP block sees."""
        return replace(self, documents=tuple(max(n - 1, 0) for n in self.documents))


@dataclass(frozen=True)
class Objective:
    """What the forward pass computes: the MTP loss, the indexer's distillation, the balance loss over so many sequences
    (0 for none), and which layers of the trunk are recomputed, and which modules of other layers. Attention selects
    entries where it can."""

    mtp: bool = True
    distil: bool = True
    balance_rows: int = 0
    recompute: frozenset[Again] = frozenset()


def even_documents(tokens: int, length: int) -> tuple[int, ...]:
    """Documents of `length` tokens, and a shorter one with what is left."""
    return (length,) * (tokens // length) + ((tokens % length,) if tokens % length else ())


def _mixers(p: Pass, expanded: bool) -> dict[str, int]:
    """Both sites of a layer; `expanded`: the first layer reads one stream repeated."""
    n, t, d = p.config.hc_mult, p.tokens, p.config.hidden_size
    streams = t * n * d
    first = t * d if expanded else streams
    # Kernels: logits, two roots, and what the output is written with. The reference keeps what is between, too.
    coefficients = (2 + n) * n + 2 + n + n * n if p.kernels else 1 + (2 + n) * n + 4 * n + 2 * n * n
    return {
        "streams": (first + streams) * p.width,
        "coefficients": 2 * t * coefficients * _F32,
        "output of attention": t * d * p.width,
        "output of the experts": t * d * p.width,
    }


def _norms(p: Pass) -> dict[str, int]:
    t, d = p.tokens, p.config.hidden_size
    # Kernels make the collapsed streams again.
    inputs = 0 if p.kernels else 2 * t * (d * p.width + _F32)
    return {"inputs": inputs, "outputs": 2 * t * d * p.width}


def _selection(p: Pass) -> int:
    """Bytes in which the kernels keep what queries selected: a bit an entry, or rows from about 6,000 tokens on, where
    a query sees more than 1.75 times what it keeps."""
    config = p.config
    entries, most = max(p.documents, default=0) // config.csa_ratio, config.index_topk
    kept = entries - max(entries - most, 0) ** 2 / max(2 * entries, 1) - entries / 2 if entries > most else entries / 2
    if entries / 2 <= 1.75 * kept:
        return p.tokens * -(-entries // 128) * 128 // 8
    return p.tokens * (most + 1) * _I32


def _attention(p: Pass, kind: str, ratio: int) -> dict[str, int]:
    config, t, w = p.config, p.tokens, p.width
    heads, wide = config.num_attention_heads, config.num_attention_heads * config.head_dim
    # Kernels find what went into the queries' norm from what came out, and need no output where few entries are seen.
    selects = kind == "csa" and p.selects
    near = p.kernels and not selects and (not ratio or max(p.documents, default=0) // ratio <= 32)
    return {
        "query latent": 2 * t * config.q_lora_rank * w + t * _F32,
        "queries": (1 if p.kernels else 2) * t * wide * w + t * heads * _F32,
        "key-value latent": 2 * t * config.head_dim * w + t * _F32,
        "output and log-sum-exp": (0 if near else t * wide * w) + t * heads * _F32,
        "selection": _selection(p) if p.kernels and selects else 0,
        "de-rotated output": t * wide * w + (0 if p.kernels else t * config.qk_rope_head_dim // 2 * _F32),
        "output latent": t * config.o_groups * config.o_lora_rank * w,
    }


def _compressor(p: Pass, ratio: int, width: int, overlap: bool) -> dict[str, int]:
    """Up to and with the rotated entries; `overlap` is the CSA form."""
    t, halves = p.tokens, 2 if overlap else 1
    groups, entries = p.groups(ratio), p.entries(ratio)
    return {
        "values and gates": 2 * t * halves * width * _F32,
        "positional gates": 2 * ratio * width * _F32 if overlap else 0,
        "slots": groups * halves * ratio * _I64 + (t * halves * _I32 if p.kernels else 0),
        "pooled": 2 * groups * width * _F32,
        "entries": entries * (2 * width * p.width + _F32),
    }


def _moe(p: Pass, hashed: bool) -> dict[str, int]:
    config, t, w = p.config, p.tokens, p.width
    d, inner, experts, k = (
        config.hidden_size,
        config.moe_intermediate_size,
        config.n_routed_experts,
        p.config.num_experts_per_tok,
    )
    return {
        "scores": t * experts * _F32,
        "choice": t * (k if hashed or p.kernels else experts) * _I64,
        "weights": t * (k if p.kernels else 2 * k + 2) * _F32,
        "dispatch order": experts * _I32 if p.kernels else t * k * _I64,
        "dispatched tokens": t * k * d * w,
        "gate and up": t * k * 2 * inner * w,
        "activation": t * k * inner * w,
        "shared expert": t * 3 * inner * w,
    }


def _indexer(p: Pass) -> dict[str, int]:
    """The indexer's own gradient path."""
    config, t, width = p.config, p.tokens, p.config.index_head_dim
    kept = _compressor(p, config.csa_ratio, width, True)
    own = t * width * p.width if config.indexer == "own_rank" else 0
    heads = config.index_n_heads
    return kept | {"query latent": own, "queries": t * heads * (width + 1) * p.width, "target sums": 2 * t * _F32}


def _balance(p: Pass, rows: int) -> dict[str, int]:
    """The balance loss of one layer over `rows` sequences."""
    experts = p.config.n_routed_experts
    return {"shares": p.tokens * (experts + 1) * _F32, "loads": rows * (experts + 1) * _F32}


def _layer(p: Pass, layer: int, o: Objective) -> dict[str, dict[str, int]]:
    """What a layer keeps, by module and name."""
    config = p.config
    kind, ratio = config.kind(layer), config.compress_ratios[layer]
    kept = {
        "mixers": _mixers(p, expanded=layer == 0),
        "norms": _norms(p),
        "attention": _attention(p, kind, ratio),
        "moe": _moe(p, config.is_hash(layer)),
    }
    if kind != "swa":
        kept["compressor"] = _compressor(p, ratio, config.head_dim, kind == "csa")
    if kind == "csa" and o.distil:
        kept["indexer"] = _indexer(p)
    if o.balance_rows and not config.is_hash(layer):
        kept["balance"] = _balance(p, o.balance_rows)
    return kept


def _recomputed(p: Pass, layer: int, o: Objective) -> dict[str, dict[str, int]]:
    """What is left of a layer that is computed again: its input, and what losses outside it read."""
    config = p.config
    streams = p.tokens * config.hidden_size * (config.hc_mult if layer else 1)
    kept = {"recomputed": {"streams": streams * p.width}}
    if o.balance_rows and not config.is_hash(layer):
        kept["balance"] = _balance(p, o.balance_rows) | {"scores": p.tokens * config.n_routed_experts * _F32}
    return kept


def _collapse(p: Pass) -> dict[str, int]:
    """A head collapse with its norm, and the cross-entropy."""
    t, d, n = p.tokens, p.config.hidden_size, p.config.hc_mult
    return {
        "streams": t * n * d * p.width,
        # Kernels: logits and two roots. The reference keeps what is between, too.
        "coefficients": t * (n + 2 if p.kernels else 1 + 3 * n) * _F32,
        "norm": 0 if p.kernels else t * (d * p.width + _F32),
        # Kernels make the gradients at once, and keep those.
        "hidden": t * d * p.width,
        "labels and log-sum-exp": 0 if p.kernels else t * (_I64 + _F32),
        "gradient of the head": p.config.vocab_size * d * p.width if p.kernels else 0,
    }


def _shared(p: Pass, layers: Collection[int], o: Objective) -> dict[str, int]:
    """What the given layers share: rotary tables, group masks, the Hadamard matrix, the sequence of each token."""
    config = p.config
    ratios = {config.compress_ratios[layer] for layer in layers}
    compressed = ratios - {0}
    angles = p.tokens * (len(ratios & {0}) + bool(compressed)) + sum(p.entries(ratio) for ratio in compressed)
    spread = o.distil and config.index_hadamard and config.csa_ratio in ratios
    return {
        "cos and sin": angles * config.qk_rope_head_dim * _F32,
        "complete groups": sum(p.entries(ratio) * _I64 for ratio in compressed if p.entries(ratio) < p.groups(ratio)),
        "hadamard": config.index_head_dim**2 * p.width if spread else 0,
    }


def _mtp_input(p: Pass) -> dict[str, int]:
    t, d, n = p.tokens, p.config.hidden_size, p.config.hc_mult
    return {
        "rows and next ids": 2 * t * _I64,
        "trunk streams and their norm": t * (2 * n * d * p.width + n * _F32),
        "embedding and its norm": t * (2 * d * p.width + _F32),
    }


def _terms(place: str, kept: dict[str, dict[str, int]]) -> list[Term]:
    return [Term(place, module, name, size) for module, names in kept.items() for name, size in names.items() if size]


def place_of(config: ModelConfig, layer: int) -> str:
    """The name of a layer's place; the MTP block is layer `num_hidden_layers`."""
    return "mtp block" if layer >= config.num_hidden_layers else f"layer {layer} ({config.kind(layer)})"


def layer_terms(p: Pass, layer: int, objective: Objective) -> list[Term]:
    """What one layer keeps of which nothing is recomputed; of another, what it keeps while its backward pass runs."""
    stay = objective.balance_rows > 0 and not p.config.is_hash(layer)
    terms = _terms(place_of(p.config, layer), _layer(p, layer, objective))
    return [term._replace(freed_by=frees(term.module, term.name, stay)) for term in terms]


def kept_terms(p: Pass, layer: int, objective: Objective) -> list[Term]:
    """What one layer of the trunk keeps from the forward pass to its backward pass."""
    if layer in objective.recompute:
        return _terms(place_of(p.config, layer), _recomputed(p, layer, objective))
    modules = modules_of(objective.recompute, layer)
    return [term for term in layer_terms(p, layer, objective) if not term.freed_by & modules]


def saved_terms(
    config: ModelConfig,
    documents: Sequence[int],
    dtype: Dtype,
    objective: Objective | None = None,
    *,
    kernels: bool = False,
) -> list[Term]:
    """Everything saved for backward by one forward pass over documents of the given lengths.

    Places are, in the order of the forward pass: `embedding`, `all layers` (what they share), each layer, `head` (the
    collapse and the loss), `mtp input`, `mtp block` and `mtp head`. What experts get is exact in sum: every token
    chooses `num_experts_per_tok` of them. The whole model learns; a step that trains the indexer alone saves less.
    """
    p, o = Pass(config, tuple(documents), dtype, kernels), objective or Objective()
    trunk = range(config.num_hidden_layers)
    kept = [layer for layer in trunk if layer not in o.recompute]
    learned = any(not config.is_hash(layer) for layer in trunk)
    inputs = {"ids": p.tokens * _I64, "sequences": p.tokens * _I64 if o.balance_rows and learned else 0}
    terms = _terms("embedding", {"inputs": inputs}) + _terms("all layers", {"shared": _shared(p, kept, o)})
    for layer in trunk:
        terms += kept_terms(p, layer, o)
    terms += _terms("head", {"head": _collapse(p)})
    if o.mtp and config.num_nextn_predict_layers:
        q, layer = p.without_last(), config.num_hidden_layers
        inputs = _mtp_input(q) | {"sequences": q.tokens * _I64 if o.balance_rows else 0}
        terms += _terms("mtp input", {"inputs": inputs, "shared": _shared(q, [layer], o)})
        terms += layer_terms(q, layer, o) + _terms("mtp head", {"head": _collapse(q)})
    return terms


def held_beside(p: Pass, objective: Objective) -> int:
    """Bytes that operators and the batch hold until the backward pass beside saved tensors: where experts' rows go, the
    entries that CSA queries read, and index arithmetic of the documents."""
    config = p.config
    blocks = config.num_hidden_layers + (config.num_nextn_predict_layers if objective.mtp else 0)
    csa = sum(config.kind(layer) == "csa" for layer in range(config.num_hidden_layers))
    selections = csa * config.index_topk if p.selects else 0
    return p.tokens * _I64 * (blocks * config.num_experts_per_tok + selections + 6)
