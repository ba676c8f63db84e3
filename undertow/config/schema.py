"""Every key of a run: its type, bounds, default, unit and meaning. A key that nothing reads does not belong here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from undertow.config.model import ModelConfig
from undertow.config.parallel import ParallelConfig
from undertow.config.scalars import told
from undertow.config.section import Section
from undertow.config.training import DataConfig, IndexerConfig, RecomputeConfig, TrainConfig

Tracker = Literal["tensorboard", "wandb", "trackio"]
Backend = Literal["auto", "reference", "triton"]


def _on_off(value: Any) -> Any:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _possible_path(value: str) -> str:
    longest = max(len(part.encode()) for part in value.split("/"))
    if longest > 255 or len(value.encode()) > 1024:
        raise ValueError("a path is at most 1024 bytes, and each name in it at most 255")
    return value


def _named(backends: dict[str, str]) -> dict[str, str]:
    return {op: backend for op, backend in backends.items() if backend != "auto"}


OpName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
Switch = Annotated[Literal["on", "off"], BeforeValidator(_on_off)]


class NumericsConfig(Section):
    """Precision, and what it may depend on."""

    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="type of weights and activations outside fp32 islands"
    )
    batch_invariant: bool = Field(False, description="give a row the same bits whatever shares its batch (slower)")


class AttentionConfig(Section):
    """Backend of each attention path; `auto` is the best one that fits the machine."""

    backend: Backend = Field("auto", description="backend of sliding-window and heavily compressed attention")
    csa_backend: Backend = Field("auto", description="backend of compressed sparse attention")


class OptimizationsConfig(Section):
    """Families of optimisations, each one switch; `undertow.config.optimizations` says what each sets and needs."""

    fusion: Switch = Field(
        "on", description="small operators by the best backend; off is the reference, and keys of ops win over both"
    )
    attention: Switch = Field(
        "on", description="attention by the best backend; off is the reference, and keys of attention win over both"
    )
    dispatch: Switch = Field("off", description="direct expert dispatch between ranks")
    grouped_gemm: Switch = Field(
        "on", description="all experts' products by the best backend; off is the reference, and ops.grouped_linear wins"
    )
    mega_moe: Switch = Field("off", description="dispatch, expert products and return as one kernel")
    layout: Switch = Field("off", description="tuned distribution of layers over pipeline stages")
    recompute: Switch = Field("off", description="recompute activations of chosen layers in the backward pass")
    fp8: Switch = Field("off", description="expert products in 8-bit floating point")


class RunConfig(Section):
    """The whole configuration of a run."""

    model: ModelConfig = Field(description="a preset by name, or a mapping of 'preset' and single fields of the model")
    data: DataConfig = DataConfig()  # type: ignore[call-arg]
    train: TrainConfig = TrainConfig()  # type: ignore[call-arg]
    indexer: IndexerConfig = IndexerConfig()  # type: ignore[call-arg]
    recompute: RecomputeConfig = RecomputeConfig()  # type: ignore[call-arg]
    parallel: ParallelConfig = ParallelConfig()  # type: ignore[call-arg]
    numerics: NumericsConfig = NumericsConfig()  # type: ignore[call-arg]
    attention: AttentionConfig = AttentionConfig()  # type: ignore[call-arg]
    ops: Annotated[dict[OpName, Backend], AfterValidator(_named)] = Field(
        {}, description="backend of single operators by name; those not named are 'auto'"
    )
    optimizations: OptimizationsConfig = OptimizationsConfig()  # type: ignore[call-arg]
    init_from: str | None = Field(
        None, min_length=1, description="model directory whose weights a new run starts from; null is a fresh model"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where tensors live; auto is cuda if there is one"
    )
    tracking: list[Tracker] = Field(
        ["tensorboard"], description="where metrics go beside metrics.jsonl: tensorboard, wandb, trackio"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="seed of weights and data order")
    out: Annotated[str, AfterValidator(_possible_path)] = Field(
        "runs/default", min_length=1, description="run directory"
    )

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        lengths = {"train.sequence_length": [self.train.sequence_length]}
        lengths["train.sequence_length_schedule"] = [tokens for _, tokens in self.train.sequence_length_schedule]
        for key, length in ((key, max(values)) for key, values in lengths.items() if values):
            if length > self.model.max_position_embeddings:
                raise ValueError(
                    f"{key} {length} exceeds model.max_position_embeddings {self.model.max_position_embeddings}"
                )
        if self.train.state_profile == "bf16" and self.numerics.dtype != "bfloat16":
            raise ValueError(
                f"train.state_profile bf16 keeps the state of bfloat16 weights, numerics.dtype is "
                f"{self.numerics.dtype}; set numerics.dtype=bfloat16 or train.state_profile=fp32"
            )
        if self.indexer.frozen and self.indexer.warmup_steps:
            raise ValueError(
                f"indexer.warmup_steps {self.indexer.warmup_steps} train the indexer alone, but indexer.frozen is "
                "true; set one of them off"
            )
        staged = self.indexer.dense_steps or self.indexer.warmup_steps
        if staged and self.model.csa_ratio not in self.model.compress_ratios:
            raise ValueError("indexer.dense_steps and warmup_steps need a model with compressed sparse attention")
        return self

    @model_validator(mode="after")
    def _recomputable(self) -> RunConfig:
        layers, modules = self.recompute.layers, self.recompute.modules
        if isinstance(layers, list) and any(layer >= self.model.num_hidden_layers for layer in layers):
            raise ValueError(
                f"recompute.layers {told(layers)}: layers are 0 to {self.model.num_hidden_layers - 1} in this model"
            )
        for name, chosen in modules.items():
            if isinstance(chosen, list) and any(layer >= self.model.num_hidden_layers for layer in chosen):
                raise ValueError(
                    f"recompute.modules.{name} {told(chosen)}: layers are 0 to "
                    f"{self.model.num_hidden_layers - 1} in this model"
                )
        every = set(range(self.model.num_hidden_layers))
        single = set() if layers == "all" else every if layers == "none" else every - set(layers)
        of = {name: single & (every if chosen == "all" else set(chosen)) for name, chosen in modules.items()}
        for name in ("expert_activation", "shared_expert"):
            if both := of.get("moe", set()) & of.get(name, set()):
                raise ValueError(
                    f"recompute.modules.{name} and moe of layer {min(both)}: moe contains {name}; name one of the two"
                )
        return self
