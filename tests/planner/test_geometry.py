"""Widths of the parallel axes, and every constraint told in one sentence."""

from __future__ import annotations

import pytest

from undertow.config.errors import ConfigError
from undertow.config.model import ModelConfig
from undertow.planner.geometry import Batch, Geometry, build_geometry, check_batch, check_model

FLASH = ModelConfig.from_preset("v4-flash")


def test_published_run_has_one_copy_of_each_expert():
    geometry = build_geometry(32, pipeline=4, expert=8)
    assert (geometry.data, geometry.dense_copies, geometry.expert_data) == (8, 8, 1)
    assert [geometry.stage_of(rank) for rank in (0, 7, 8, 31)] == [0, 0, 1, 3]
    assert Batch(256, 4096).microbatches(geometry) == 32


def test_experts_take_ranks_of_tensor_parallelism():
    geometry = build_geometry(16, tensor=4, pipeline=4, expert=4)
    assert geometry == Geometry(4, 4, 4, 1, 1)
    assert (geometry.gpus, geometry.dense_copies, geometry.expert_data) == (16, 1, 1)
    check_model(FLASH, geometry)
    check_batch(FLASH, geometry, Batch(8, 4096))


def test_context_copies_dense_weights():
    geometry = build_geometry(64, tensor=2, pipeline=2, expert=4, context=4)
    assert (geometry.data, geometry.dense_copies, geometry.expert_data, geometry.sequence_ranks) == (4, 16, 8, 8)
    assert Batch(8, 8192, 2).tokens(geometry) == 4096


def test_weights_lie_in_parts_over_as_many_ranks_as_asked_for():
    every, some, none = (build_geometry(16, expert=4, context=2, shard=shard) for shard in (None, 4, 1))
    assert [each.dense_parts for each in (every, some, none)] == [16, 8, 2]
    assert [each.expert_parts for each in (every, some, none)] == [4, 4, 1]


@pytest.mark.parametrize(
    ("gpus", "widths", "message"),
    [
        (8, {"tensor": 2, "shard": 3}, "shard 3 does not divide the 4 data-parallel ranks; allowed: 1, 2, 4"),
        (32, {"tensor": 0}, "tensor is 0; allowed: at least 1"),
        (0, {}, "gpus is 0; allowed: at least 1"),
        (30, {"tensor": 2, "pipeline": 4}, "30 GPUs are not a multiple of tensor 2 x pipeline 4 x context 1 = 8"),
        (32, {"pipeline": 4, "expert": 16}, "expert 16 does not divide the 8 ranks of a stage (32 GPUs / pipeline 4)"),
    ],
)
def test_widths(gpus, widths, message):
    with pytest.raises(ConfigError) as caught:
        build_geometry(gpus, **widths)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "geometry", "message"),
    [
        ({}, Geometry(tensor=3), "tensor 3 does not divide num_attention_heads 64"),
        ({"num_attention_heads": 48}, Geometry(tensor=16), "tensor 16 does not divide o_groups 8"),
        ({"o_groups": 16, "index_n_heads": 8}, Geometry(tensor=16), "tensor 16 does not divide index_n_heads 8"),
        ({"moe_intermediate_size": 4}, Geometry(tensor=8), "tensor 8 does not divide moe_intermediate_size 4"),
        ({"vocab_size": 129281}, Geometry(tensor=2), "tensor 2 does not divide vocab_size 129281"),
        ({}, Geometry(expert=6, data=6), "expert 6 does not divide n_routed_experts 256"),
        ({}, Geometry(pipeline=44), "pipeline 44 exceeds num_hidden_layers 43"),
    ],
)
def test_models(config, geometry, message):
    with pytest.raises(ConfigError) as caught:
        check_model(ModelConfig.from_preset("v4-flash", **config), geometry)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_indexer_heads_do_not_matter_without_indexer():
    config = ModelConfig.from_preset(
        "v4-flash", num_hidden_layers=2, compress_ratios=(0, 128, 0), num_hash_layers=0, index_n_heads=1
    )
    check_model(config, Geometry(tensor=8))


@pytest.mark.parametrize(
    ("geometry", "batch", "message"),
    [
        (Geometry(data=8), Batch(20, 4096, 2), "batch of 20 sequences is not a multiple of micro-batch 2 x data-p"),
        (Geometry(data=8), Batch(0, 4096), "batch size is 0; allowed: at least 1"),
        (Geometry(), Batch(1, 1_048_577), "sequence length 1048577 exceeds max_position_embeddings 1048576"),
        (Geometry(tensor=2, context=2), Batch(1, 4094), "sequence length 4094 is not a multiple of tensor 2 x context"),
        (Geometry(context=8), Batch(1, 512), "context 8 leaves each rank 64 tokens, fewer than sliding_window 128"),
    ],
)
def test_batches(geometry, batch, message):
    with pytest.raises(ConfigError) as caught:
        check_batch(FLASH, geometry, batch)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
