"""Cache and weights of serving, and decoding against V3.2, against the published figures."""

from __future__ import annotations

import pytest

from undertow.config.errors import ConfigError
from undertow.config.model import ModelConfig
from undertow.model.parameters import all_parameters
from undertow.model.weights import all_weights
from undertow.planner.geometry import Geometry, build_geometry
from undertow.planner.serving.cache import CacheBytes, cache_format_of, key_bytes, record_bytes
from undertow.planner.serving.decode import compare_with_v32, decode_work, entries
from undertow.planner.serving.room import plan_serving, stored_bytes, weight_format_of, weights_bytes

FLASH, PRO = ModelConfig.from_preset("v4-flash"), ModelConfig.from_preset("v4-pro")
MIB, GIB = 2**20, 2**30


def test_records():
    assert [record_bytes(FLASH, form) for form in ("fp8", "fp8-fp4", "bf16")] == [584, 584, 1024]
    assert [key_bytes(FLASH, form) for form in ("fp8", "fp8-fp4", "bf16")] == [132, 68, 256]


@pytest.mark.parametrize(("form", "per_token"), [("fp8", 3850.25), ("fp8-fp4", 3514.25), ("bf16", 6880.0)])
def test_bytes_per_token(form, per_token):
    assert CacheBytes(FLASH, form).per_token == per_token


def test_bytes_of_a_sequence():
    cache = CacheBytes(FLASH)
    parts = [cache.window, cache.csa_state, cache.indexer_state, cache.hca_state]
    assert [round(part / MIB, 2) for part in parts] == [3.07, 1.31, 0.33, 10.0]
    assert round(cache.fixed / MIB, 1) == 14.7
    online = CacheBytes(FLASH, online=True)
    assert (round(online.hca_state / MIB, 2), round(online.fixed / MIB, 1)) == (0.12, 4.8)
    assert (round(512 * cache.fixed / GIB, 2), round(512 * online.fixed / GIB, 2)) == (7.35, 2.41)
    assert [round((cache.of_length(n) - cache.fixed) / GIB, 2) for n in (131_072, 1_048_576)] == [0.47, 3.76]


def test_entries_appear_when_their_group_is_complete():
    cache = CacheBytes(FLASH)
    lengths = [cache.of_length(n) - cache.fixed for n in (3, 4, 127, 128)]
    assert lengths == [0, 21 * 716, 31 * 21 * 716, 32 * 21 * 716 + 20 * 584]


def test_mtp_has_a_window():
    assert CacheBytes(FLASH, mtp=True).fixed - CacheBytes(FLASH).fixed == 128 * 584


def test_entries_of_a_query():
    assert [entries(FLASH, layer, 10**6) for layer in (0, 2, 3)] == [128, 640, 7940.5]
    assert entries(FLASH, 3, 2**20) == 8320
    assert entries(FLASH, 2, 1024) == 128 + 256


@pytest.mark.parametrize(("config", "flops", "plain", "cache"), [(FLASH, 10.0, 12.1, 7.3), (PRO, 26.8, 26.6, 10.5)])
def test_decoding_against_v32(config, flops, plain, cache):
    found = compare_with_v32(config)
    assert 100 * found.flops == pytest.approx(flops, abs=0.1)
    assert 100 * found.plain_flops == pytest.approx(plain, abs=0.1)
    assert 100 * found.cache == pytest.approx(cache, abs=0.05)


def test_decode_work_by_hand():
    work = decode_work(FLASH, 10**6, active=13e9)
    keys = 2 * 128 + 21 * 640 + 20 * 7940.5
    assert work.products == 26e9 and work.core == pytest.approx(4 * 64 * 512 * keys)
    assert work.index == 21 * 2 * 64 * 128 * 250_000
    assert compare_with_v32(FLASH).cache_bytes == pytest.approx(3.52e9, rel=1e-3)


def test_weights_of_the_release():
    assert weights_bytes(FLASH, "fp4") == pytest.approx(159.6e9, rel=5e-4)
    low, high = all_parameters(FLASH)[:2]
    assert low + high == 290_942_289_362 - 41 * 256
    assert weights_bytes(FLASH, "bf16") == 2 * low + 4 * high + 4 * 41 * 256 + 8 * 2_327_040


def test_weights_of_a_rank():
    split = build_geometry(8, tensor=8, expert=8)
    whole = sum(stored_bytes(weight, "bf16") for weight in all_weights(FLASH) if weight.split == "whole")
    whole += 4 * 41 * 256 + 8 * 2_327_040
    assert weights_bytes(FLASH, "bf16", split) == whole + (weights_bytes(FLASH, "bf16") - whole) // 8
    assert weights_bytes(FLASH, "fp8", split) == pytest.approx(37.6e9, rel=1e-3)
    assert weights_bytes(FLASH, "fp4", mtp=False) < weights_bytes(FLASH, "fp4") - 3.3e9


def test_room():
    geometry = build_geometry(8, tensor=8, expert=8)
    plan = plan_serving(FLASH, geometry, 192 * 10**9, 16_384, weights="fp8", update_buckets=2)
    assert plan.room == int(192e9 * 0.9) - plan.weights - 2**30
    assert plan.sequence_bytes == CacheBytes(FLASH, online=True).of_length(16_384)
    assert plan.sequences == plan.room // plan.sequence_bytes and plan.fits
    assert plan.sequences * plan.sequence_bytes <= plan.room < (plan.sequences + 1) * plan.sequence_bytes
    assert plan.tokens == FLASH.max_position_embeddings


def test_no_room():
    plan = plan_serving(FLASH, Geometry(), 141 * 10**9, 1024)
    assert plan.room < 0 and (plan.sequences, plan.tokens, plan.fits) == (0, 0, False)


def test_longest_context():
    spare = plan_serving(FLASH, Geometry(), 400 * 10**9, 1024)
    need = spare.weights + spare.cache.fixed + 128_000 * 3850.25
    plan = plan_serving(FLASH, Geometry(), int(need) + 1, 1024, memory_fraction=1.0)
    assert plan.tokens == 128_000


@pytest.mark.parametrize(
    ("geometry", "changes", "message"),
    [
        (Geometry(pipeline=2), {}, "serving replicas have neither stages nor context parallelism, given pipeline 2"),
        (Geometry(), {"memory_fraction": 1.5}, "memory_fraction is 1.5; allowed: above 0, at most 1"),
        (Geometry(), {"length": 0}, "length is 0; allowed: 1 to max_position_embeddings 1048576"),
        (Geometry(), {"update_buckets": -1}, "update_buckets is -1; allowed: at least 0"),
        (Geometry(tensor=16), {}, "tensor 16 does not divide o_groups 8"),
    ],
)
def test_mistakes(geometry, changes, message):
    with pytest.raises(ConfigError) as caught:
        plan_serving(FLASH, geometry, 192 * 10**9, **{"length": 1024, **changes})
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_names():
    assert (weight_format_of("fp4"), cache_format_of("fp8-fp4")) == ("fp4", "fp8-fp4")
    with pytest.raises(ConfigError, match="unknown weight format 'fp16'; did you mean"):
        weight_format_of("fp16")
    with pytest.raises(ConfigError, match="unknown cache format 'int3'"):
        cache_format_of("int3")
