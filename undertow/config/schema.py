"""Every key of a run: its type, bounds, default, unit and meaning. A key that nothing reads does not belong here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from undertow.config.model import ModelConfig

Backend = Literal["auto", "reference", "triton", "gluon", "flydsl", "aiter"]


def _on_off(value: Any) -> Any:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _possible_path(value: str) -> str:
    longest = max(len(part.encode()) for part in value.split("/"))
    if longest > 255 or len(value.encode()) > 1024:
        raise ValueError("a path is at most 1024 bytes, and each name in it at most 255")
    return value


OpName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
Switch = Annotated[Literal["on", "off"], BeforeValidator(_on_off)]


class Section(BaseModel):
    """A frozen group of keys; unknown keys, wrong types, NaN and infinity are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class DataConfig(Section):
    """What is learned from."""

    corpus: str = Field("plays", description="text to train on: 'plays' is the corpus that is shipped")
    tokenizer: str = Field("small-bpe", description="tokenizer: 'small-bpe' is the one that is shipped")
    validation_fraction: float = Field(0.05, gt=0, lt=1, description="share of the corpus held out for evaluation")


class TrainConfig(Section):
    """The pretraining loop: length, batch, schedule, optimizer, objective and rhythm."""

    steps: int = Field(300, ge=1, description="optimizer steps")
    batch_size: int = Field(8, ge=1, description="sequences per step")
    sequence_length: int = Field(512, ge=2, description="tokens per sequence")
    learning_rate: float = Field(3e-3, gt=0, description="peak learning rate, after warm-up")
    min_learning_rate: float = Field(3e-4, ge=0, description="learning rate at the last step")
    warmup_steps: int = Field(20, ge=0, description="steps of linear rise from zero to the peak")
    decay_fraction: float = Field(
        1.0, ge=0, le=1, description="share of the steps after warm-up, counted from the end, that decay along a cosine"
    )
    weight_decay: float = Field(
        0.1, ge=0, description="decoupled decay per step, as a share of learning rate and weight"
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="memory of the gradient mean")
    beta2: float = Field(0.95, ge=0, lt=1, description="memory of the squared gradient")
    epsilon: float = Field(1e-20, gt=0, description="AdamW's addend to the root of the squared gradient")
    gradient_clip: float = Field(1.0, gt=0, description="largest global norm of the gradient")
    mtp_weight: float = Field(0.3, ge=0, description="weight of the multi-token-prediction loss beside the main loss")
    eval_every: int = Field(100, ge=1, description="steps between evaluations on held-out text")
    eval_batches: int = Field(4, ge=1, description="batches per evaluation")
    checkpoint_every: int = Field(100, ge=1, description="steps between checkpoints; the last step always writes one")
    log_every: int = Field(10, ge=1, description="steps between log lines; metrics.jsonl has every step")

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(f"min_learning_rate {self.min_learning_rate} exceeds learning_rate {self.learning_rate}")
        return self


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

    fusion: Switch = Field("off", description="fused kernels beside attention")
    attention: Switch = Field("off", description="fast attention backends")
    dispatch: Switch = Field("off", description="direct expert dispatch between ranks")
    grouped_gemm: Switch = Field("off", description="one kernel for the products of all experts")
    mega_moe: Switch = Field("off", description="dispatch, expert products and return as one kernel")
    layout: Switch = Field("off", description="tuned distribution of layers over pipeline stages")
    recompute: Switch = Field("off", description="recompute activations of chosen layers in the backward pass")
    fp8: Switch = Field("off", description="expert products in 8-bit floating point")


class RunConfig(Section):
    """The whole configuration of a run."""

    model: ModelConfig = Field(description="a preset by name, or a mapping of 'preset' and single fields of the model")
    data: DataConfig = DataConfig()  # type: ignore[call-arg]
    train: TrainConfig = TrainConfig()  # type: ignore[call-arg]
    numerics: NumericsConfig = NumericsConfig()  # type: ignore[call-arg]
    attention: AttentionConfig = AttentionConfig()  # type: ignore[call-arg]
    ops: dict[OpName, Backend] = Field(
        {}, description="backend of single operators by name; those not named are 'auto'"
    )
    optimizations: OptimizationsConfig = OptimizationsConfig()  # type: ignore[call-arg]
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where tensors live; auto is cuda if there is one"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="seed of weights and data order")
    out: Annotated[str, AfterValidator(_possible_path)] = Field(
        "runs/default", min_length=1, description="run directory"
    )

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.train.sequence_length > self.model.max_position_embeddings:
            raise ValueError(
                f"train.sequence_length {self.train.sequence_length} exceeds "
                f"model.max_position_embeddings {self.model.max_position_embeddings}"
            )
        return self
