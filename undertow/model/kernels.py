"""Whether all operators of a training run that have a kernel run in it on a GPU, told from its configuration alone."""

from __future__ import annotations

from undertow.config.model import ModelConfig
from undertow.config.schema import RunConfig


def in_kernels(run: RunConfig) -> bool:
    """Whether a GPU computes every step of the run in kernels: none is switched off, and they serve type and widths.

    Then closed forms of memory are those of the kernels; where some operators are the reference's, its own forms, which
    are larger, are taken.
    """
    backends = (*run.ops.values(), run.attention.backend, run.attention.csa_backend)
    wanted = "reference" not in backends and not run.numerics.batch_invariant
    return wanted and run.numerics.dtype == "bfloat16" and serve(run.model)


def serve(config: ModelConfig) -> bool:
    """Whether kernels serve the widths of a model: what `undertow.ops.registry.TRITON` says of each."""
    return (
        config.num_attention_heads in (8, 16, 32, 64, 128)
        and config.head_dim % 64 == 0
        and config.sliding_window <= 128
        and config.index_n_heads in (16, 32, 64)
        and config.index_head_dim in (16, 32, 64, 128)
        and config.hc_mult in (2, 4)
        and config.hidden_size <= 8192
        and config.hidden_size % 16 == config.moe_intermediate_size % 16 == 0
        and max(config.csa_ratio * 2, *config.compress_ratios) <= 256
    )
