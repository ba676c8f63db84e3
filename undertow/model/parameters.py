"""Numbers of parameters in closed form (model card 10), without torch: by place, stored type and optimizer."""

from __future__ import annotations

from typing import NamedTuple

from undertow.config.model import ModelConfig


class Parameters(NamedTuple):
    """Parameters of one place. `low` have the model's type, `high` stay float32; `matrices` of each are Muon's, where
    it is used, and the rest AdamW's. `largest` is the largest single tensor."""

    low: int
    high: int
    low_matrices: int
    high_matrices: int
    largest: int

    def __add__(self, other: Parameters) -> Parameters:  # type: ignore[override]
        """Both together."""
        low, high, low_matrices, high_matrices = (a + b for a, b in zip(self[:4], other[:4], strict=True))
        return Parameters(low, high, low_matrices, high_matrices, max(self.largest, other.largest))


def _place(matrices: list[int], vectors: int, high_matrices: int, high_vectors: int) -> Parameters:
    low = sum(matrices)
    return Parameters(low + vectors, high_matrices + high_vectors, low, high_matrices, max(matrices, default=0))


def indexer_parameters(config: ModelConfig) -> Parameters:
    """The indexer of one CSA layer."""
    d, width, heads = config.hidden_size, config.index_head_dim, config.index_n_heads
    own = config.indexer == "own_rank"
    query = [d * width, width * heads * width] if own else [config.q_lora_rank * heads * width]
    gates = 2 * config.csa_ratio * width
    return _place([*query, d * heads, 2 * d * width, 2 * d * width], width, 0, gates)


def layer_parameters(config: ModelConfig, layer: int) -> Parameters:
    """One layer, indexer included; the MTP block's is layer `num_hidden_layers`, and has its own projections, norms and
    head collapse with it."""
    d, n, q, c = config.hidden_size, config.hc_mult, config.q_lora_rank, config.head_dim
    wide, kind, ratio = config.num_attention_heads * c, config.kind(layer), config.compress_ratios[layer]
    up = config.o_groups * config.o_lora_rank
    experts, inner = config.n_routed_experts, config.moe_intermediate_size
    matrices = [d * q, q * wide, d * c, wide * config.o_lora_rank, up * d, d * experts]
    matrices += [2 * experts * inner * d, experts * inner * d, *[inner * d] * 3]
    vectors, gates, halves = 2 * d + q + c, 0, 2 if kind == "csa" else 1
    if kind != "swa":
        matrices += [halves * c * d] * 2
        vectors, gates = vectors + c, ratio * halves * c
    rows = (2 + n) * n
    mixers, biases = 2 * rows * n * d, 2 * (rows + 3)
    if layer >= config.num_hidden_layers:
        matrices, vectors = [*matrices, d * d, d * d], vectors + 3 * d
        mixers, biases = mixers + n * n * d, biases + n + 1
    own = _place(matrices, vectors, mixers, biases + gates + config.num_attention_heads)
    return own + indexer_parameters(config) if kind == "csa" else own


def table_parameters(config: ModelConfig) -> Parameters:
    """The embedding, or the LM head: AdamW's."""
    size = config.vocab_size * config.hidden_size
    return Parameters(size, 0, 0, 0, size)


def collapse_parameters(config: ModelConfig) -> Parameters:
    """The trunk's head collapse and the final norm."""
    n, d = config.hc_mult, config.hidden_size
    return _place([], d, n * n * d, n + 1)


def all_parameters(config: ModelConfig) -> Parameters:
    """The whole model."""
    total = table_parameters(config) + table_parameters(config) + collapse_parameters(config)
    for layer in range(config.num_hidden_layers + config.num_nextn_predict_layers):
        total = total + layer_parameters(config, layer)
    return total


def buffer_bytes(config: ModelConfig) -> int:
    """Hash tables (int64) and router biases (float32)."""
    tables = config.num_hash_layers * config.vocab_size * config.num_experts_per_tok * 8
    learned = config.num_hidden_layers + config.num_nextn_predict_layers - config.num_hash_layers
    return tables + learned * config.n_routed_experts * 4
