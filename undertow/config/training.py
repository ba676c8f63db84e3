"""Keys of a training run: its data, loop, objective, optimizer, the indexer's own training, and recomputation."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from undertow.config.section import Section

MANY = 10**9  # more steps, sequences or tokens than any run has
LARGE = 1e30  # beyond any rate or weight that single precision can still multiply


def _ascending(stages: list[list[int]]) -> list[list[int]]:
    steps = [step for step, _ in stages]
    if any(not 2 <= step <= MANY for step in steps) or any(a >= b for a, b in pairwise(steps)):
        raise ValueError(f"steps {steps} must be ascending, the first at least 2")
    return stages


def _values_from(least: int):
    def check(stages: list[list[int]]) -> list[list[int]]:
        if any(not least <= value <= MANY for _, value in stages):
            raise ValueError(f"values {[value for _, value in stages]} must lie between {least} and {MANY}")
        return stages

    return AfterValidator(check)


Pair = Annotated[list[int], Field(min_length=2, max_length=2)]
Stages = Annotated[list[Pair], AfterValidator(_ascending)]
"""`[step, value]` pairs: from that optimizer step on, the value."""


Layers = list[Annotated[int, Field(ge=0)]]
RecomputeModule = Literal[
    "mixer_norm", "query", "attention_core", "output", "expert_activation", "shared_expert", "moe"
]  # fmt: skip


class DataConfig(Section):
    """What is learned from."""

    corpus: str = Field(
        "plays",
        description="'plays' is shipped; else a .txt, .jsonl or .parquet file or a directory of such, a directory of "
        "prepared shards, or hf:NAME of a data set on the Hugging Face hub or on disk",
    )
    kind: Literal["text", "chat"] = Field(
        "text", description="text: every token is learned; chat: prompts and responses, responses alone are learned"
    )
    text_field: str = Field("text", min_length=1, description="field of a record that holds its text (kind text)")
    split: str = Field("train", min_length=1, description="split of a Hugging Face data set")
    tokenizer: str = Field(
        "small-bpe",
        description="'small-bpe': that of the shards, else of init_from, else the largest shipped one that fits; or a "
        "shipped name, a directory with tokenizer.json, or such a file",
    )
    validation_fraction: float = Field(0.05, gt=0, lt=1, description="share of the corpus held out for evaluation")


class TrainConfig(Section):
    """The training loop: length, batch, schedule, optimizer, objective and rhythm."""

    steps: int = Field(300, ge=1, le=MANY, description="optimizer steps")
    batch_size: int = Field(8, ge=1, le=MANY, description="sequences per step")
    batch_size_schedule: Annotated[Stages, _values_from(1)] = Field(
        [], description="[[step, sequences], ...]: from that step on, so many sequences per step"
    )
    micro_batch_size: int | None = Field(
        None, ge=1, le=MANY, description="sequences per forward and backward pass; null is the whole batch at once"
    )
    sequence_length: int = Field(512, ge=2, le=MANY, description="tokens per sequence")
    sequence_length_schedule: Annotated[Stages, _values_from(2)] = Field(
        [], description="[[step, tokens], ...]: from that step on, so many tokens per sequence"
    )
    optimizer: Literal["muon", "adamw"] = Field(
        "muon", description="muon: Muon for matrices and AdamW for the rest; adamw: AdamW for all"
    )
    state_profile: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="optimizer state of bfloat16 weights: fp32 main weights and moments, or bf16 moments and the 16 "
        "bits that a weight lacks (with weight and gradient 10 bytes a parameter of AdamW, 8 of Muon)",
    )
    offload_optimizer: bool = Field(
        False,
        description="keep optimizer state in memory of the host, from which it passes through the GPU in every step",
    )
    learning_rate: float = Field(3e-3, gt=0, le=LARGE, description="peak learning rate, after warm-up")
    min_learning_rate: float = Field(3e-4, ge=0, le=LARGE, description="learning rate at the last step")
    warmup_steps: int = Field(20, ge=0, le=MANY, description="steps of linear rise from zero to the peak")
    decay_fraction: float = Field(
        1.0, ge=0, le=1, description="share of the steps after warm-up, counted from the end, that decay along a cosine"
    )
    weight_decay: float = Field(
        0.1, ge=0, le=LARGE, description="decoupled decay per step, as a share of learning rate and weight"
    )
    momentum: float = Field(0.95, ge=0, lt=1, description="Muon's memory of the gradient")
    muon_split_heads: bool = Field(False, description="Muon takes each head of the query projections by itself")
    muon_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="type of Muon's iteration; auto is bfloat16 on a GPU, float32 elsewhere"
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's memory of the gradient mean")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's memory of the squared gradient")
    epsilon: float = Field(1e-20, gt=0, le=LARGE, description="AdamW's addend to the root of the squared gradient")
    gradient_clip: float = Field(
        1.0,
        gt=0,
        le=LARGE,
        description="largest global norm of the gradient; the indexer's, of a loss of its own, is bounded apart",
    )
    mtp_weight: float = Field(
        0.3, ge=0, le=LARGE, description="weight of the multi-token-prediction loss until the decay begins"
    )
    mtp_weight_in_decay: float = Field(
        0.1, ge=0, le=LARGE, description="that weight from the start of the learning rate's decay"
    )
    balance_weight: float = Field(
        1e-4, ge=0, le=LARGE, description="weight of the sequence balance loss of each layer with learned routing"
    )
    bias_update_rate: float = Field(
        1e-3, ge=0, le=LARGE, description="how far a step moves each router bias towards an even load"
    )
    uniform_routing: bool = Field(
        False,
        description="every layer takes its experts in turn, whatever a token's scores: for measurements of speed alone",
    )
    z_loss_weight: float = Field(0.0, ge=0, le=LARGE, description="weight of the squared log-normaliser of the logits")
    skip_limit: int = Field(
        10, ge=1, le=MANY, description="the run stops after so many steps in a row whose loss or gradient is not finite"
    )
    eval_every: int = Field(100, ge=1, le=MANY, description="steps between evaluations on held-out text")
    eval_sequences: int = Field(
        32, ge=1, le=MANY, description="held-out sequences per evaluation, always the first ones"
    )
    checkpoint_every: int = Field(
        100, ge=1, le=MANY, description="steps between checkpoints; the last step always writes one"
    )
    checkpoint_keep: int | None = Field(
        None, ge=1, le=MANY, description="newest checkpoints that are kept; null keeps all"
    )
    log_every: int = Field(10, ge=1, le=MANY, description="steps between log lines; metrics.jsonl has every step")

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(f"min_learning_rate {self.min_learning_rate} exceeds learning_rate {self.learning_rate}")
        return self


class IndexerConfig(Section):
    """Training of the lightning indexer (CSA layers), which the main objective does not reach."""

    frozen: bool = Field(False, description="leave the indexer as it is: no distillation")
    weight: float = Field(
        1.0, gt=0, le=LARGE, description="weight of the distillation loss; its gradient reaches the indexer alone"
    )
    dense_steps: int = Field(
        0, ge=0, le=MANY, description="steps at the start in which CSA layers attend to every visible entry"
    )
    learns_while_dense: bool = Field(True, description="distil during dense_steps too")
    warmup_steps: int = Field(
        0,
        ge=0,
        le=MANY,
        description="steps after dense_steps, attention still dense, in which the indexer alone is trained",
    )
    warmup_learning_rate: float = Field(1e-3, gt=0, le=LARGE, description="constant learning rate of warmup_steps")


class RecomputeConfig(Section):
    """Which activations are computed again in the backward pass instead of kept."""

    layers: Literal["none", "all"] | Layers = Field(
        "none",
        description="layers of the trunk whose activations are recomputed: none, all, or a list of their numbers",
    )
    modules: dict[RecomputeModule, Literal["all"] | Layers] = Field(
        {},
        description="single modules that are recomputed in other layers, by name: all, or a list of layers",
    )
