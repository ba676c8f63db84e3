"""Named model shapes. Released ones are exact (model card); the small ones keep every branch of the architecture
busy."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import ValidationError

from undertow.config.errors import ConfigError
from undertow.config.model import ModelConfig

_FLASH: dict[str, Any] = {"compress_ratios": (0, 0, *(4, 128) * 20, 4, 0)}

_PRO: dict[str, Any] = dict(
    hidden_size=7168, num_hidden_layers=61, num_attention_heads=128, q_lora_rank=1536, o_groups=16,
    compress_ratios=(128, 128, *(4, 128) * 29, 4, 0), index_topk=1024, n_routed_experts=384,
    moe_intermediate_size=3072, routed_scaling_factor=2.5,
)  # fmt: skip

# Flash widths, with the 32 experts that one rank holds at expert parallelism 8.
_PROXY: dict[str, Any] = dict(
    num_hidden_layers=5, compress_ratios=(0, 4, 128, 4, 128, 0), num_hash_layers=1, n_routed_experts=32
)

# 4,096 tokens of vocabulary: the shipped tokenizer's size, so that the weights lie in the layers.
_SMALL: dict[str, Any] = dict(
    vocab_size=4096, hidden_size=512, num_hidden_layers=9, num_attention_heads=8, head_dim=128, qk_rope_head_dim=32,
    q_lora_rank=256, o_groups=4, o_lora_rank=128, compress_ratios=(0, 4, 128, 4, 128, 4, 128, 4, 128, 0),
    index_n_heads=16, index_head_dim=64, index_topk=128, n_routed_experts=16, num_experts_per_tok=4,
    moe_intermediate_size=496, num_hash_layers=2, max_position_embeddings=65536,
    rope_scaling=dict(original_max_position_embeddings=4096),
)  # fmt: skip

_TINY: dict[str, Any] = dict(
    vocab_size=2048, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, head_dim=64, qk_rope_head_dim=16,
    q_lora_rank=48, o_groups=2, o_lora_rank=64, compress_ratios=(0, 4, 64, 4, 0), sliding_window=64, index_n_heads=16,
    index_head_dim=32, index_topk=32, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=48,
    num_hash_layers=1, max_position_embeddings=16384, rope_scaling=dict(original_max_position_embeddings=1024),
)  # fmt: skip

_DEBUG: dict[str, Any] = dict(
    vocab_size=256, hidden_size=64, num_hidden_layers=5, num_attention_heads=4, head_dim=32, qk_rope_head_dim=8,
    q_lora_rank=24, o_groups=2, o_lora_rank=16, compress_ratios=(0, 0, 4, 8, 4, 0), sliding_window=8, index_n_heads=16,
    index_head_dim=16, index_topk=3, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
    num_hash_layers=1, max_position_embeddings=4096, rope_scaling=dict(original_max_position_embeddings=64),
)  # fmt: skip

PRESETS: dict[str, dict[str, Any]] = {
    "v4-flash": _FLASH,
    "v4-pro": _PRO,
    "v4-proxy": _PROXY,
    "v4-small": _SMALL,
    "v4-tiny": _TINY,
    "v4-debug": _DEBUG,
}


def nearest(name: str, known: list[str]) -> str:
    """`; did you mean 'x'?` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def preset(name: str, **overrides: object) -> ModelConfig:
    """The preset `name` with fields replaced. Raises `ConfigError` naming the nearest preset or field."""
    if name not in PRESETS:
        raise ConfigError(f"unknown preset '{name}'{nearest(name, list(PRESETS))} (presets: {', '.join(PRESETS)})")
    for key in overrides:
        if key not in ModelConfig.model_fields:
            raise ConfigError(f"preset {name}: unknown field '{key}'{nearest(key, list(ModelConfig.model_fields))}")
    try:
        return ModelConfig.model_validate({**PRESETS[name], **overrides})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"preset {name}{': ' + where if where else ''}: {first['msg'].removeprefix('Value error, ')}"
        ) from None
