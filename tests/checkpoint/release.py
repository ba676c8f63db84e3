"""A release in miniature: the names, types and scales of the published checkpoint, at any width, of random codes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from undertow.checkpoint.names import expected_tensors, is_routed, is_scaled, scale_name
from undertow.config.model import ModelConfig
from undertow.config.model_json import released_config
from undertow.quant.dialect import Dialect

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_groups": 8,
    "o_lora_rank": 8,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "moe_intermediate_size": 32,
}
"""Widths of a Flash whose 69,187 tensors take some 60 MB."""


def small_flash(**other: object) -> ModelConfig:
    """Flash at reduced widths: all its layers and experts, and so all its names."""
    return ModelConfig.from_preset("v4-flash", **{**SMALL, **other})


def tiny(**other: object) -> ModelConfig:
    """The smallest model, wide enough for several blocks of FP8."""
    return ModelConfig.from_preset("v4-debug", **{"hidden_size": 192, "moe_intermediate_size": 160, **other})


def release_tensors(
    config: ModelConfig, seed: int = 0, experts: str = "fp4", dialect: Dialect = "ocp"
) -> dict[str, torch.Tensor]:
    """The tensors of a release of `config`.

    `experts` is `fp4` or, as in the base models, `fp8` with float32 scales. Codes are random, negative zeros and blocks
    with room to spare among them; FNUZ has canonical bytes.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (shape, kind) in expected_tensors(config, "released").items():
        if kind == "index":
            tensors[name] = torch.rand(shape[0], config.n_routed_experts, generator=generator).argsort(1)[:, : shape[1]]
        elif is_routed(name) and experts == "fp4":
            packed = torch.randint(0, 256, (shape[0], shape[1] // 2), dtype=torch.uint8, generator=generator)
            tensors[name] = packed.view(torch.int8)
            tensors[scale_name(name)] = _exponents(generator, (shape[0], -(-shape[1] // 32)))
        elif is_scaled(name):
            codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            codes[(codes & 0x7F) == 0x7F] = 0x30
            if dialect == "fnuz":
                codes[codes == 0x80] = 0
            tensors[name] = codes.view(torch.float8_e4m3fn if dialect == "ocp" else torch.float8_e4m3fnuz)
            scales = _exponents(generator, (-(-shape[0] // 128), -(-shape[1] // 128)))
            tensors[scale_name(name)] = scales.float() if is_routed(name) else scales
        else:
            values = torch.randn(shape, generator=generator) * 0.1 + 0.5
            tensors[name] = values if kind == "float32" else values.bfloat16()
    return tensors


def _exponents(generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    codes = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
    return codes.view(torch.float8_e8m0fnu)


def write_release(
    directory: Path, config: ModelConfig, tensors: dict[str, torch.Tensor] | None = None, files: int = 2
) -> dict[str, torch.Tensor]:
    """Write `tensors` (a release by default) with an index, `config.json` and two small files; return them."""
    tensors = release_tensors(config) if tensors is None else tensors
    directory.mkdir(parents=True)
    names = list(tensors)
    size = -(-len(names) // files)
    weight_map = {}
    for index in range(files):
        file = f"model-{index + 1:05}-of-{files:05}.safetensors"
        held = {name: tensors[name].contiguous() for name in names[index * size : (index + 1) * size]}
        save_file(held, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    block = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    values = released_config(config) | {"expert_dtype": "fp4", "quantization_config": block}
    (directory / "config.json").write_text(json.dumps(values))
    (directory / "generation_config.json").write_text('{"temperature": 1.0}')
    (directory / "LICENSE").write_text("MIT")
    return tensors
