"""Parameter counts of the released models, to the last digit (model card 10), on the meta device."""

from __future__ import annotations

import pytest

from undertow.config.model import ModelConfig
from undertow.model.build import build_model
from undertow.model.count import Counts, count
from undertow.model.transformer import Transformer

# Per layer, and of the whole model.
LAYERS = {
    "v4-flash": dict(
        attention=106_956_352, csa_compressors=8_393_216, indexers=10_749_056, hca_compressors=4_260_352,
        routed_experts=6_442_450_944, shared_experts=25_165_824, routers=1_048_576, router_biases=256,
    ),
    "v4-pro": dict(
        attention=299_894_912, csa_compressors=14_684_672, indexers=16_712_832, hca_compressors=7_406_080,
        routed_experts=25_367_150_592, shared_experts=66_060_288, routers=2_752_512, router_biases=384,
    ),
}  # fmt: skip
MODELS = {
    "v4-flash": dict(
        embedding=529_530_880, head=529_530_880, hyper_connections=33_884_439, norms=356_352, mtp=6_610_048_891,
        all_attention=5_086_317_888, all_moe=278_152_620_032, main=284_332_240_471, total=290_942_289_362,
        active=12_740_560_471, active_with_head=13_270_091_351, hash_table_entries=2_327_040,
    ),
    "v4-pro": dict(
        embedding=926_679_040, head=926_679_040, hyper_connections=84_069_603, norms=881_664, mtp=25_840_145_979,
        all_attention=19_465_103_232, all_moe=1_551_593_789_184, main=1_572_997_201_763, total=1_598_837_347_742,
        active=47_925_700_707, active_with_head=48_852_379_747, hash_table_entries=2_327_040,
    ),
}  # fmt: skip
LAYER_COUNTS = {
    "v4-flash": dict(csa_compressors=21, indexers=21, hca_compressors=20, router_biases=40),
    "v4-pro": dict(csa_compressors=30, indexers=30, hca_compressors=31, router_biases=58),
}


@pytest.fixture(scope="module", params=list(LAYERS))
def released(request) -> tuple[str, Counts]:
    return request.param, count(ModelConfig.from_preset(request.param))


def test_layers(released):
    name, counts = released
    layers = ModelConfig.from_preset(name).num_hidden_layers
    assert {
        module: counts.by_module[module] / LAYER_COUNTS[name].get(module, layers) for module in LAYERS[name]
    } == LAYERS[name]


def test_whole_model(released):
    name, counts = released
    assert {
        what: counts.by_module[what] if what in counts.by_module else getattr(counts, what) for what in MODELS[name]
    } == MODELS[name]


def test_modules_add_up(released):
    _, counts = released
    assert sum(counts.by_module.values()) == counts.total
    main = counts.all_attention + counts.all_moe
    main += sum(counts.by_module[name] for name in ("embedding", "head", "hyper_connections", "norms"))
    assert main == counts.main


def test_own_rank_variant():
    counts = count(ModelConfig.from_preset("v4-flash", indexer="own_rank"))
    assert counts.total == 290_799_158_738
    assert counts.all_attention == 4_943_187_264
    assert counts.by_module["indexers"] == 21 * 3_933_312
    assert (counts.all_moe, counts.by_module["mtp"]) == (278_152_620_032, 6_610_048_891)


def test_model_and_configuration_count_alike():
    config = ModelConfig.from_preset("v4-debug")
    model = build_model(config)
    counts = count(model)
    assert counts == count(config)
    biases = sum(b.numel() for n, b in model.named_buffers() if n.endswith("gate.bias"))
    assert counts.total == sum(p.numel() for p in model.parameters()) + biases
    assert counts.hash_table_entries == config.vocab_size * config.num_experts_per_tok


def test_no_memory_is_taken():
    model = Transformer(ModelConfig.from_preset("v4-pro"), device="meta")
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"meta"}


def test_model_without_mtp_or_compressed_layers():
    config = ModelConfig.from_preset(
        "v4-debug", num_hidden_layers=2, compress_ratios=(0, 0), num_nextn_predict_layers=0, num_hash_layers=0
    )
    counts = count(config)
    assert counts.main == counts.total
    absent = ("csa_compressors", "indexers", "hca_compressors", "mtp")
    assert {name: counts.by_module[name] for name in absent} == dict.fromkeys(absent, 0)
    assert counts.hash_table_entries == 0
