"""How many parameters a model has, and where: counted on its module tree, without memory for the weights."""

from __future__ import annotations

from dataclasses import dataclass

from undertow.config.model import ModelConfig
from undertow.model.transformer import Transformer


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


def count(model: ModelConfig | Transformer) -> Counts:
    """Count a model, or the one that a configuration describes (built on the meta device: seconds, no memory)."""
    if isinstance(model, ModelConfig):
        model = Transformer(model, device="meta")
    config = model.config
    by_module = dict.fromkeys(_MODULES, 0)
    tables = 0
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("tid2eid"):
            tables += tensor.numel()
        else:
            by_module[_module(name, config)] += tensor.numel()
    passive = by_module["embedding"] + by_module["head"] + by_module["router_biases"] + by_module["mtp"]
    routed = by_module["routed_experts"]
    idle = routed - routed // config.n_routed_experts * config.num_experts_per_tok
    return Counts(by_module, sum(by_module.values()) - passive - idle, tables)
