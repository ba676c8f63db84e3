"""Single modules of a layer that are computed again: which implementation has them, and the seconds that they take.

The tensors that each frees are marked in the table of `undertow.planner.memory.activations`. A module starts from what
stays: the query path from the norm of its latent, the attention core from the queries and keys, the output path from
the de-rotated output of the core, the experts from the normed tokens, which are dispatched once more for `moe`.
`reference` is what training does, see `undertow.model.modules`; its `mixer_norm` makes all that a site reads of the
streams once more.
"""

from __future__ import annotations

from collections.abc import Mapping

from undertow.config.errors import ConfigError
from undertow.config.model import ModelConfig
from undertow.model.flops import layer_flops
from undertow.planner.memory.activations import Implementation
from undertow.planner.memory.recompute import MODULES, Module, Recompute, ranges

OPERATIONS_PER_BYTE = 88
"""Operations of matrices that take as long as a byte read or written by a part without products. An assumption: the 397
TFLOP/s to which the MI355X was fitted over 57 % of its 8 TB/s, the published share that elementwise kernels reach."""

_ALREADY: dict[Implementation, tuple[Module, ...]] = {"tight": ("mixer_norm",), "primus": ("expert_activation",)}


def modules_of(implementation: Implementation) -> tuple[Module, ...]:
    """Modules that an implementation keeps and could compute again."""
    already = _ALREADY.get(implementation, ())
    return tuple(module for module in MODULES if module not in already)


def check_modules(implementation: Implementation, recompute: Recompute) -> None:
    """Raises `ConfigError` for modules that an implementation has not, or computes again in any case."""
    known = modules_of(implementation)
    for module, layers in recompute.by_module.items():
        if module in known:
            continue
        raise ConfigError(
            f"implementation {implementation} computes its {module} again in any case, given "
            f"{module}:{ranges(layers)}; its modules are {', '.join(known)}"
        )


def module_seconds(
    config: ModelConfig,
    layer: int,
    rows: float,
    length: int,
    rate: float,
    core: float,
    per_byte: float = OPERATIONS_PER_BYTE,
) -> Mapping[Module, float]:
    """Seconds that each module of a layer adds to the backward pass of `rows` of `length` tokens, by name.

    Products run at `rate` operations a second, which contains what is elementwise about them; `core` are the seconds of
    the attention core, whose output is turned back besides. A byte takes as long as `per_byte` operations.
    """
    t, d, streams = rows * length, config.hidden_size, config.hc_mult
    wide, inner = config.num_attention_heads * config.head_dim, config.moe_intermediate_size
    latent = config.o_groups * config.o_lora_rank
    return {
        "mixer_norm": per_byte * 2 * t * streams * d * (2 + 4) / rate,
        "query": 2 * t * config.q_lora_rank * wide / rate,
        "attention_core": core + per_byte * t * wide * (2 + 2) / rate,
        "output": 2 * t * (wide * config.o_lora_rank + latent * d) / rate,
        "expert_activation": per_byte * t * config.num_experts_per_tok * inner * (4 + 2) / rate,
        "shared_expert": 2 * t * 3 * d * inner * config.n_shared_experts / rate,
        "moe": rows * layer_flops(config, layer, length)["moe"] / rate,
    }
