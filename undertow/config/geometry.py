"""How ranks are shared out among tensor, pipeline, expert, context and data parallelism, and what forbids it."""

from __future__ import annotations

from dataclasses import dataclass

from undertow.config.errors import ConfigError
from undertow.config.model import ModelConfig


@dataclass(frozen=True)
class Geometry:
    """Widths of every axis. Made by `build_geometry`.

    Dense weights live on `tensor` x `pipeline` ranks and are repeated over `context` x `data` of them. The ranks of one
    stage, `tensor` x `context` x `data`, are also those over which experts are dealt out: `expert` of them hold all,
    and `expert_data` such groups repeat them. An expert is whole on its rank. `shard` of the data-parallel ranks hold
    dense weights in parts; 0 stands for all of them.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1
    data: int = 1
    shard: int = 0

    @property
    def gpus(self) -> int:
        """All ranks."""
        return self.pipeline * self.stage_ranks

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def dense_copies(self) -> int:
        """Ranks that hold the same dense weights: their gradients are summed, their optimizer state can be shared."""
        return self.context * self.data

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts."""
        return self.stage_ranks // self.expert

    @property
    def dense_parts(self) -> int:
        """Ranks among which a dense weight is divided, where ranks share weights out."""
        return self.context * (self.shard or self.data)

    @property
    def expert_parts(self) -> int:
        """Ranks among which the experts of a rank are divided, where ranks share weights out."""
        return 1 if self.shard == 1 else self.expert_data

    @property
    def sequence_ranks(self) -> int:
        """Ranks that share the tokens of one sequence outside attention: tensor parallelism splits them there."""
        return self.tensor * self.context

    def stage_of(self, rank: int) -> int:
        """Pipeline rank of a GPU: the pipeline is the outermost axis."""
        return rank // self.stage_ranks


def build_geometry(
    gpus: int, *, tensor: int = 1, pipeline: int = 1, expert: int = 1, context: int = 1, shard: int | None = None
) -> Geometry:
    """The geometry of so many GPUs; data parallelism takes what the other axes leave.

    Raises `ConfigError` in one sentence for widths that do not divide the GPUs.
    """
    widths = {"gpus": gpus, "tensor": tensor, "pipeline": pipeline, "expert": expert, "context": context}
    for name, width in widths.items():
        if width < 1:
            raise ConfigError(f"{name} is {width}; allowed: at least 1")
    taken = tensor * pipeline * context
    if gpus % taken:
        raise ConfigError(
            f"{gpus} GPUs are not a multiple of tensor {tensor} x pipeline {pipeline} x context {context} = {taken}; "
            f"take a multiple of {taken}, or other widths"
        )
    stage = gpus // pipeline
    if stage % expert:
        raise ConfigError(
            f"expert {expert} does not divide the {stage} ranks of a stage ({gpus} GPUs / pipeline {pipeline}), over "
            "which experts are dealt out"
        )
    data = gpus // taken
    if shard is not None and (shard < 1 or data % shard):
        raise ConfigError(
            f"shard {shard} does not divide the {data} data-parallel ranks; allowed: "
            f"{', '.join(str(n) for n in range(1, data + 1) if data % n == 0)}"
        )
    return Geometry(tensor, pipeline, expert, context, data, shard or 0)


def check_model(config: ModelConfig, geometry: Geometry) -> None:
    """Raises `ConfigError`, naming the constraint, for a model that the geometry cannot share out."""
    tensor = geometry.tensor
    for name in ("num_attention_heads", "o_groups", "index_n_heads", "moe_intermediate_size", "vocab_size"):
        size = getattr(config, name)
        if name == "index_n_heads" and config.csa_ratio not in config.compress_ratios:
            continue
        if size % tensor:
            raise ConfigError(f"tensor {tensor} does not divide {name} {size}, which it must cut into equal parts")
    if config.n_routed_experts % geometry.expert:
        raise ConfigError(
            f"expert {geometry.expert} does not divide n_routed_experts {config.n_routed_experts}: every rank must "
            "hold as many experts as the next"
        )
    if geometry.pipeline > config.num_hidden_layers:
        raise ConfigError(
            f"pipeline {geometry.pipeline} exceeds num_hidden_layers {config.num_hidden_layers}: every stage needs a "
            "layer"
        )
