"""Parameters of ranks against the published figures."""

from __future__ import annotations

import pytest

from undertow.config.layout import parse_layout
from undertow.config.model import ModelConfig
from undertow.model.parameters import closed_counts, layer_parameters
from undertow.model.weights import Weight, all_weights, layer_weights
from undertow.planner.geometry import Batch, Geometry, build_geometry
from undertow.planner.memory.activations import Microbatch
from undertow.planner.memory.model import MemoryModel
from undertow.planner.memory.parameters import Stage, local, rank_parameters
from undertow.planner.memory.state import state_profile

FLASH = ModelConfig.from_preset("v4-flash")
OWN_RANK = ModelConfig.from_preset("v4-flash", indexer="own_rank")


def model(config: ModelConfig, geometry: Geometry) -> MemoryModel:
    return MemoryModel(Microbatch(config, geometry, Batch(256, 4096), "tight"), state_profile("published-fp32"))


def test_published_variant():
    counts = closed_counts(OWN_RANK)
    assert counts.total == 290_799_158_738 and counts.all_attention == 4_943_187_264
    assert round(counts.all_moe / 1e9, 2) == 278.15 and round(counts.by_module["mtp"] / 1e9, 2) == 6.61
    shares = [counts.all_moe, counts.all_attention]
    assert [round(100 * share / counts.total, 2) for share in shares] == [95.65, 1.70]
    assert round(counts.main / 1e9, 2) == 284.19
    assert round((counts.active_with_head) / 1e9, 2) == 13.13


def test_shares_of_a_moe_layer():
    counts = closed_counts(OWN_RANK).by_module
    parts = [counts[name] for name in ("routed_experts", "shared_experts", "routers")]
    assert [round(100 * part / sum(parts), 2) for part in parts] == [99.59, 0.39, 0.02]


def test_released_model():
    counts = closed_counts(FLASH)
    assert (counts.main, counts.by_module["mtp"], counts.total) == (284_332_240_471, 6_610_048_891, 290_942_289_362)
    assert (counts.all_attention, counts.active, counts.active_with_head) == (
        5_086_317_888,
        12_740_560_471,
        13_270_091_351,
    )
    pro = closed_counts(ModelConfig.from_preset("v4-pro"))
    assert (pro.main, pro.total, pro.active) == (1_572_997_201_763, 1_598_837_347_742, 47_925_700_707)


def test_published_rank_zero():
    found = model(OWN_RANK, build_geometry(32, pipeline=4, expert=8)).parameters([Stage(tuple(range(11)), True)])
    assert (found.dense.total, found.experts.total, found.total) == (2_081_824_658, 8_858_370_048, 10_940_194_706)


def test_stages_add_up_to_the_model():
    geometry = Geometry(pipeline=4)
    layout = parse_layout("Et*10|t*12|t*12|t*9mL")
    stages = [Stage.of(layout, stage) for stage in range(4)]
    assert stages[3] == Stage((*range(34, 43), 43), head=True)
    found = [model(FLASH, geometry).parameters([stage]).total for stage in stages]
    twice = FLASH.vocab_size * FLASH.hidden_size  # the MTP block reads a second copy of the embedding
    assert sum(found) == closed_counts(FLASH).total - 41 * 256 + twice


def test_chunks_of_a_rank_share_one_embedding():
    chunks = [Stage((0, 1), embedding=True), Stage((42, 43), head=True)]
    apart = [model(FLASH, Geometry()).parameters([chunk]).total for chunk in chunks]
    assert model(FLASH, Geometry()).parameters(chunks).total == sum(apart) - FLASH.vocab_size * FLASH.hidden_size


@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (2, 8), (8, 2), (4, 4)])
def test_split_by_hand(tensor, expert):
    geometry = Geometry(tensor=tensor, expert=expert, data=8)
    found = rank_parameters(layer_weights(FLASH, 2), geometry)
    d, inner = FLASH.hidden_size, FLASH.moe_intermediate_size
    assert found.experts.total == 256 // expert * 3 * d * inner
    heads = 64 // tensor
    cut = heads * (512 * 1024 + 1) + 8192 // tensor * (4096 + d) + heads * (128 * 1024 + d) + 3 * d * inner // tensor
    whole = layer_parameters(FLASH, 2).total - 256 * 3 * d * inner
    uncut = whole - 64 * (512 * 1024 + 1) - 8192 * (4096 + d) - 64 * (128 * 1024 + d) - 3 * d * inner
    assert found.dense.total == cut + uncut


def test_every_tensor_divides_as_the_geometry_allows():
    for weight in all_weights(FLASH):
        parts = {"whole": 1, "tensor": 8, "experts": 16}[weight.split]
        assert local(weight, Geometry(tensor=8, expert=16, data=2)).elements * parts == weight.elements


def test_a_tensor_that_does_not_divide():
    with pytest.raises(ValueError, match=r"x \[3, 5\] does not divide into 2 equal parts"):
        local(Weight("x", (3, 5), "tensor"), Geometry(tensor=2))
