"""Who updates which parameter, and into which matrices a tensor divides."""

from __future__ import annotations

from typing import Any

import pytest

from undertow.config.model import ModelConfig
from undertow.config.presets import PRESETS
from undertow.model.transformer import Transformer
from undertow.optim.groups import everything, split

VARIANTS = [(name, indexer) for name in PRESETS for indexer in ("shared", "own_rank")]


def meta(preset: str, **changes: Any) -> Transformer:
    return Transformer(ModelConfig.from_preset(preset, **changes), device="meta")


@pytest.mark.parametrize(("preset", "indexer"), VARIANTS)
def test_every_parameter_is_in_one_group(preset, indexer):
    model = meta(preset, indexer=indexer)
    groups = split(model)
    names = [entry.name for entry in (*groups.muon, *groups.adamw)]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert all(model.get_parameter(e.name) is e.parameter for e in (*groups.muon, *groups.adamw))
    assert all(sum(e.heights) == e.parameter.shape[-2] for e in groups.muon)
    assert all(not e.heights for e in groups.adamw)
    assert {e.parameter.dim() for e in groups.muon} == {2, 3}


def test_adamw_has_what_the_paper_names_and_what_is_added_to_logits():
    groups = split(meta("v4-debug"))
    ends = {e.name.removeprefix("mtp.0.").removeprefix("layers.").lstrip("0123456789.") for e in groups.adamw}
    assert ends == {
        "embed.weight", "head.weight", "norm.weight", "enorm.weight", "hnorm.weight", "attn_norm.weight",
        "ffn_norm.weight", "attn.q_norm.weight", "attn.kv_norm.weight", "attn.compressor.norm.weight",
        "attn.indexer.compressor.norm.weight", "hc_attn.base", "hc_attn.scale", "hc_ffn.base", "hc_ffn.scale",
        "hc_head.base", "hc_head.scale", "attn.attn_sink", "attn.compressor.ape", "attn.indexer.compressor.ape",
    }  # fmt: skip


def test_matrices_of_flash():
    heights = {entry.name: entry.heights for entry in split(meta("v4-flash", indexer="own_rank")).muon}
    csa = {name.removeprefix("layers.4."): rows for name, rows in heights.items() if name.startswith("layers.4.")}
    assert csa == {
        "hc_attn.fn": (4, 4, 16),
        "hc_ffn.fn": (4, 4, 16),
        "attn.wq_a.weight": (1024,),
        "attn.wq_b.weight": (32768,),
        "attn.wkv.weight": (512,),
        "attn.wo_a.weight": (1024,) * 8,
        "attn.wo_b.weight": (4096,),
        "attn.compressor.wkv.weight": (512, 512),
        "attn.compressor.wgate.weight": (512, 512),
        "attn.indexer.wq_a.weight": (128,),
        "attn.indexer.wq_b.weight": (8192,),
        "attn.indexer.weights_proj.weight": (64,),
        "attn.indexer.compressor.wkv.weight": (128, 128),
        "attn.indexer.compressor.wgate.weight": (128, 128),
        "ffn.gate.weight": (256,),
        "ffn.experts.w13": (2048, 2048),
        "ffn.experts.w2": (4096,),
        "ffn.shared_experts.w1.weight": (2048,),
        "ffn.shared_experts.w3.weight": (2048,),
        "ffn.shared_experts.w2.weight": (4096,),
    }
    assert heights["layers.3.attn.compressor.wkv.weight"] == (512,)  # plain windows: one series
    assert heights["hc_head.fn"] == heights["mtp.0.hc_head.fn"] == (4,)
    assert heights["mtp.0.e_proj.weight"] == heights["mtp.0.h_proj.weight"] == (4096,)


def test_heads_can_be_split():
    heights = {entry.name: entry.heights for entry in split(meta("v4-flash"), split_heads=True).muon}
    assert heights["layers.4.attn.wq_b.weight"] == (512,) * 64
    assert heights["layers.4.attn.indexer.wq_b.weight"] == (128,) * 64
    assert heights["layers.4.attn.wo_b.weight"] == (4096,)


def test_adamw_for_everything():
    model = meta("v4-debug")
    groups = everything(model)
    assert not groups.muon
    assert [e.name for e in groups.adamw] == [name for name, _ in model.named_parameters()]
