"""The shape of a DeepSeek-V4-family model: every field of the released `config.json`, checked and frozen.

Nothing here imports torch, so that planning, `--help` and configuration stay fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

LayerKind = Literal["swa", "csa", "hca"]

LARGEST = 2**31
"""Bound of every size: beyond it nothing can be allocated, and products of sizes would leave 64 bits."""


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Ratio = Annotated[int, Field(le=LARGEST)]


class RopeScaling(BaseModel):
    """YaRN constants of the compressed layers (model card: factor 16, original length 65,536, beta 32 / 1)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    factor: float = Field(16.0, ge=1.0, description="how far the rotary table is stretched")
    original_max_position_embeddings: int = Field(
        65536, gt=0, le=LARGEST, description="tokens the unstretched table was made for"
    )
    beta_fast: float = Field(32.0, gt=0, description="rotations above which a dimension is left alone")
    beta_slow: float = Field(1.0, gt=0, description="rotations below which a dimension is stretched fully")


class ModelConfig(BaseModel):
    """Architecture of one model. Field names are those of the released `config.json`; lengths are in tokens.

    `compress_ratios` is the layer schedule as data, one entry per layer and then one per MTP block: 0 is sliding-window
    attention (SWA), `csa_ratio` is compressed sparse attention (CSA), any other number is heavily compressed attention
    (HCA) with that many tokens an entry. Build one with `ModelConfig.from_preset`, `ModelConfig.from_json` or by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    vocab_size: int = Field(129280, gt=0, le=LARGEST)
    hidden_size: int = Field(4096, gt=0, le=LARGEST, description="width of one residual stream")
    num_hidden_layers: int = Field(43, gt=0, le=LARGEST, description="layers of the main stack, without MTP")
    num_attention_heads: int = Field(64, gt=0, le=LARGEST)
    head_dim: int = Field(512, gt=0, le=LARGEST, description="width of a query head and of the shared key-value latent")
    qk_rope_head_dim: int = Field(64, gt=0, le=LARGEST, description="trailing dimensions of a head that are rotated")
    q_lora_rank: int = Field(1024, gt=0, le=LARGEST)
    o_groups: int = Field(8, gt=0, le=LARGEST, description="groups of consecutive heads in the output projection")
    o_lora_rank: int = Field(1024, gt=0, le=LARGEST)
    compress_ratios: Annotated[tuple[Ratio, ...], BeforeValidator(_as_tuple)] = Field(
        description="tokens per compressed entry of each layer, then of each MTP block"
    )
    csa_ratio: int = Field(4, gt=1, le=LARGEST, description="the ratio that marks a CSA layer; its windows overlap")
    sliding_window: int = Field(128, gt=0, le=LARGEST, description="keys a query sees exactly, itself included")
    index_n_heads: int = Field(64, gt=0, le=LARGEST)
    index_head_dim: int = Field(128, gt=0, le=LARGEST)
    index_topk: int = Field(512, gt=0, le=LARGEST, description="compressed entries a CSA query keeps")
    indexer: Literal["shared", "own_rank"] = Field(
        "shared",
        description="query path of the indexer: the released shared latent, or the published AMD variant's own",
    )
    index_hadamard: bool = Field(
        True, description="rotate indexer queries and keys by the orthonormal Hadamard matrix, as released"
    )
    hc_mult: int = Field(4, gt=0, le=LARGEST, description="residual streams of the hyper-connections")
    hc_sinkhorn_iters: int = Field(20, gt=0, le=LARGEST)
    hc_eps: float = Field(1e-6, gt=0)
    n_routed_experts: int = Field(256, gt=0, le=LARGEST)
    n_shared_experts: int = Field(1, ge=1, le=1)
    num_experts_per_tok: int = Field(6, gt=0, le=LARGEST)
    moe_intermediate_size: int = Field(2048, gt=0, le=LARGEST, description="width of a routed and of the shared expert")
    num_hash_layers: int = Field(3, ge=0, le=LARGEST, description="leading layers that route by token id")
    routed_scaling_factor: float = Field(1.5, gt=0)
    swiglu_limit: float = Field(10.0, gt=0, description="bound of gate (above) and up (both sides) before SwiGLU")
    rope_theta: float = Field(10000.0, gt=0, description="rotary base of SWA layers and MTP blocks")
    compress_rope_theta: float = Field(160000.0, gt=0, description="rotary base of CSA and HCA layers")
    rope_scaling: RopeScaling = RopeScaling()  # type: ignore[call-arg]
    max_position_embeddings: int = Field(1048576, gt=0, le=LARGEST)
    num_nextn_predict_layers: int = Field(1, ge=0, le=1, description="multi-token-prediction (MTP) blocks")
    rms_norm_eps: float = Field(1e-6, gt=0)
    initializer_range: float = Field(0.02, gt=0, description="standard deviation of fresh weights")
    bos_token_id: int = Field(0, ge=0, le=LARGEST)
    eos_token_id: int = Field(1, ge=0, le=LARGEST)

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        blocks = self.num_hidden_layers + self.num_nextn_predict_layers
        ratios = self.compress_ratios
        if len(ratios) != blocks:
            raise ValueError(
                f"compress_ratios has {len(ratios)} entries; {blocks} are needed: "
                "num_hidden_layers + num_nextn_predict_layers"
            )
        if any(r < 0 or r == 1 for r in ratios):
            raise ValueError(
                f"compress_ratios {list(ratios)}: an entry is 0 (SWA) or at least 2 tokens per compressed entry"
            )
        if any(ratios[self.num_hidden_layers :]):
            raise ValueError(
                f"compress_ratios {list(ratios)}: MTP blocks are sliding-window layers, their entries must be 0"
            )
        if self.num_hash_layers > self.num_hidden_layers:
            raise ValueError(
                f"num_hash_layers {self.num_hash_layers} exceeds num_hidden_layers {self.num_hidden_layers}"
            )
        if self.num_attention_heads % self.o_groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of o_groups {self.o_groups}"
            )
        for name, width in (("head_dim", self.head_dim), ("index_head_dim", self.index_head_dim)):
            if self.qk_rope_head_dim > width:
                raise ValueError(f"qk_rope_head_dim {self.qk_rope_head_dim} exceeds {name} {width}")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim {self.qk_rope_head_dim} must be even: rotary dimensions come in pairs")
        if self.index_hadamard and self.index_head_dim & (self.index_head_dim - 1):
            raise ValueError(f"index_head_dim {self.index_head_dim} must be a power of two, or index_hadamard false")
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} exceeds n_routed_experts {self.n_routed_experts}"
            )
        if self.sliding_window > self.max_position_embeddings:
            raise ValueError(
                f"sliding_window {self.sliding_window} exceeds max_position_embeddings {self.max_position_embeddings}"
            )
        for name in ("bos_token_id", "eos_token_id"):
            if getattr(self, name) >= self.vocab_size:
                raise ValueError(f"{name} {getattr(self, name)} lies outside the vocabulary of {self.vocab_size}")
        return self

    def kind(self, layer: int) -> LayerKind:
        """Attention kind of a layer; MTP blocks follow the main stack at index `num_hidden_layers`."""
        ratio = self.compress_ratios[layer]
        return "swa" if ratio == 0 else "csa" if ratio == self.csa_ratio else "hca"

    def is_hash(self, layer: int) -> bool:
        """Whether a layer routes by token id instead of by learned scores."""
        return layer < self.num_hash_layers

    @classmethod
    def from_preset(cls, name: str, **overrides: object) -> ModelConfig:
        """A named shape (`undertow.config.presets`), with fields replaced by `overrides`.

        Raises `ConfigError` for an unknown preset or field, naming the nearest one.
        """
        from undertow.config.presets import preset

        return preset(name, **overrides)

    @classmethod
    def from_json(cls, path: str | Path) -> ModelConfig:
        """Read a released, transformers or Undertow `config.json` (or the directory that holds one).

        Raises `ConfigError` for a missing file, a foreign architecture or an unsupported value.
        """
        from undertow.config.model_json import read_config

        return read_config(Path(path))
