"""Numbers of parameters in closed form (model card 10), without torch: by place, stored type, optimizer and module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from undertow.config.model import ModelConfig
from undertow.model.weights import Weight, all_weights, collapse_weights, indexer_weights, layer_weights, table_weight


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

    @property
    def total(self) -> int:
        """Parameters of both types."""
        return self.low + self.high


NO_PARAMETERS = Parameters(0, 0, 0, 0, 0)


def sum_weights(weights: Iterable[Weight]) -> Parameters:
    """What the given tensors add up to."""
    low = high = low_matrices = high_matrices = largest = 0
    for weight in weights:
        size = weight.elements
        largest = max(largest, size)
        if weight.high:
            high, high_matrices = high + size, high_matrices + size * weight.muon
        else:
            low, low_matrices = low + size, low_matrices + size * weight.muon
    return Parameters(low, high, low_matrices, high_matrices, largest)


def indexer_parameters(config: ModelConfig) -> Parameters:
    """The indexer of one CSA layer."""
    return sum_weights(indexer_weights(config))


def layer_parameters(config: ModelConfig, layer: int) -> Parameters:
    """One layer, indexer included; the MTP block's is layer `num_hidden_layers`, and has its own projections, norms and
    head collapse with it."""
    return sum_weights(layer_weights(config, layer))


def table_parameters(config: ModelConfig) -> Parameters:
    """The embedding, or the LM head: AdamW's."""
    return sum_weights([table_weight(config, "embed")])


def collapse_parameters(config: ModelConfig) -> Parameters:
    """The trunk's head collapse and the final norm."""
    return sum_weights(collapse_weights(config))


def all_parameters(config: ModelConfig) -> Parameters:
    """The whole model."""
    return sum_weights(all_weights(config))


def buffer_bytes(config: ModelConfig) -> int:
    """Hash tables (int64) and router biases (float32)."""
    return hash_table_entries(config) * 8 + router_biases(config) * 4


def hash_table_entries(config: ModelConfig) -> int:
    """Entries of the tables that say which experts a token id goes to."""
    return config.num_hash_layers * config.vocab_size * config.num_experts_per_tok


def router_biases(config: ModelConfig) -> int:
    """Entries of the biases of all layers with learned routing, MTP included."""
    blocks = config.num_hidden_layers + config.num_nextn_predict_layers
    return (blocks - config.num_hash_layers) * config.n_routed_experts


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters (model card 10). Router biases count, though they are buffers; hash tables do not.

    `by_module` adds up to `total`: `attention` (projections, norms and sinks of every layer), `csa_compressors`,
    `indexers`, `hca_compressors`, `routed_experts`, `shared_experts`, `routers`, `router_biases`, `embedding`, `head`,
    `hyper_connections` (with the final collapse), `norms` (of layers and the final one), and `mtp` as a whole.
    `active` are those whose values a token meets in the main stack: its own experts alone, without embedding, head and
    router biases.
    """

    by_module: dict[str, int]
    active: int
    hash_table_entries: int

    @property
    def total(self) -> int:
        """All parameters, MTP blocks included."""
        return sum(self.by_module.values())

    @property
    def main(self) -> int:
        """Without MTP blocks."""
        return self.total - self.by_module["mtp"]

    @property
    def active_with_head(self) -> int:
        """`active` and the LM head."""
        return self.active + self.by_module["head"]

    @property
    def all_attention(self) -> int:
        """Attention of the main stack with compressors and indexers."""
        return sum(self.by_module[name] for name in ("attention", "csa_compressors", "indexers", "hca_compressors"))

    @property
    def all_moe(self) -> int:
        """Experts and routers of the main stack."""
        return sum(self.by_module[name] for name in ("routed_experts", "shared_experts", "routers", "router_biases"))


_TOP = {"embed": "embedding", "head": "head", "hc_head": "hyper_connections", "norm": "norms", "mtp": "mtp"}
_SITE = {"hc_attn": "hyper_connections", "hc_ffn": "hyper_connections", "attn_norm": "norms", "ffn_norm": "norms"}
_FFN = {"experts": "routed_experts", "shared_experts": "shared_experts"}
_MODULES: tuple[str, ...] = (
    "attention", "csa_compressors", "indexers", "hca_compressors", "routed_experts", "shared_experts", "routers",
    "router_biases", "embedding", "head", "hyper_connections", "norms", "mtp",
)  # fmt: skip


def _module(name: str, config: ModelConfig) -> str:
    """The key of `by_module` that the tensor `name` counts for."""
    top, *path = name.split(".")
    if top != "layers":
        return _TOP[top]
    layer, site, part = int(path[0]), path[1], path[2]
    if site in _SITE:
        return _SITE[site]
    if site == "ffn":
        return _FFN[part] if part in _FFN else "router_biases" if path[3] == "bias" else "routers"
    if part == "compressor":
        return f"{config.kind(layer)}_compressors"
    return "indexers" if part == "indexer" else "attention"


def counts_of(config: ModelConfig, tensors: Iterable[tuple[str, int]]) -> Counts:
    """Counts of the tensors given by name and number of values, hash tables and router biases among them."""
    by_module = dict.fromkeys(_MODULES, 0)
    tables = 0
    for name, elements in tensors:
        if name.endswith("tid2eid"):
            tables += elements
        else:
            by_module[_module(name, config)] += elements
    passive = by_module["embedding"] + by_module["head"] + by_module["router_biases"] + by_module["mtp"]
    routed = by_module["routed_experts"]
    idle = routed - routed // config.n_routed_experts * config.num_experts_per_tok
    return Counts(by_module, sum(by_module.values()) - passive - idle, tables)


def closed_counts(config: ModelConfig) -> Counts:
    """`undertow.model.count.count` in closed form."""
    tensors = [(weight.name, weight.elements) for weight in all_weights(config)]
    learned = range(config.num_hash_layers, config.num_hidden_layers)
    tensors += [(f"layers.{layer}.ffn.gate.bias", config.n_routed_experts) for layer in learned]
    tensors += [
        (f"mtp.{block}.ffn.gate.bias", config.n_routed_experts) for block in range(config.num_nextn_predict_layers)
    ]
    return counts_of(config, [*tensors, ("tid2eid", hash_table_entries(config))])
