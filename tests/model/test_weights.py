"""The list of weights against the module tree: every name and shape, for shapes drawn at random."""

from __future__ import annotations

import random

import pytest
import torch

from undertow.config.model import ModelConfig
from undertow.model.count import count
from undertow.model.parameters import closed_counts
from undertow.model.transformer import Transformer
from undertow.model.weights import all_weights
from undertow.optim.groups import split


def drawn(seed: int) -> ModelConfig:
    draw = random.Random(seed)
    layers, mtp = draw.randint(1, 7), draw.randint(0, 1)
    groups, experts, dim = draw.randint(1, 4), draw.randint(2, 9), draw.choice((16, 24, 32))
    ratios = [draw.choice((0, 4, 4, 8, 128)) for _ in range(layers)] + [0] * mtp
    return ModelConfig.from_preset(
        "v4-debug",
        vocab_size=draw.randint(8, 300),
        hidden_size=draw.randint(2, 40) * 2,
        num_hidden_layers=layers,
        num_nextn_predict_layers=mtp,
        num_hash_layers=draw.randint(0, layers),
        num_attention_heads=groups * draw.randint(1, 5),
        head_dim=dim,
        o_groups=groups,
        o_lora_rank=draw.randint(3, 20),
        q_lora_rank=draw.randint(3, 30),
        compress_ratios=tuple(ratios),
        index_n_heads=draw.randint(1, 8),
        index_head_dim=draw.choice((8, 16, 32)),
        indexer=draw.choice(("shared", "own_rank")),
        hc_mult=draw.randint(1, 5),
        n_routed_experts=experts,
        num_experts_per_tok=draw.randint(1, experts),
        moe_intermediate_size=draw.randint(1, 40),
    )


@pytest.mark.parametrize("seed", range(50))
def test_module_tree(seed):
    config = drawn(seed)
    model = Transformer(config, device="meta", dtype=torch.bfloat16)
    muon = {entry.name for entry in split(model).muon}
    tree = {n: (tuple(p.shape), p.dtype == torch.float32, n in muon) for n, p in model.named_parameters()}
    listed = [*all_weights(config)]
    assert {weight.name: (weight.shape, weight.high, weight.muon) for weight in listed} == tree
    assert len(listed) == len(tree)
    assert closed_counts(config) == count(model)


@pytest.mark.parametrize("preset", ["v4-flash", "v4-pro", "v4-small"])
def test_released_shapes(preset):
    config = ModelConfig.from_preset(preset)
    assert closed_counts(config) == count(config)


def test_stored_types_of_the_release():
    stored = {weight.name: weight.stored for weight in all_weights(ModelConfig.from_preset("v4-flash"))}
    assert stored["layers.2.attn.indexer.wq_b.weight"] == stored["mtp.0.e_proj.weight"] == "fp8"
    assert (
        stored["layers.2.attn.compressor.wkv.weight"] == stored["layers.2.attn.indexer.weights_proj.weight"] == "bf16"
    )
    assert stored["layers.2.ffn.experts.w13"] == "fp4"
    assert stored["layers.2.attn.attn_sink"] == stored["hc_head.fn"] == "fp32"
    assert stored["layers.2.ffn.gate.weight"] == stored["embed.weight"] == "bf16"
