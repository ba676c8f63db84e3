"""Replicas that serve or sample: how wide, how many, and what a length of sequence takes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from undertow.config.clusters import Pool, parse_cluster
from undertow.config.errors import ConfigError
from undertow.config.model import ModelConfig
from undertow.planner.serving.cache import CacheBytes
from undertow.planner.serving.decode import cache_read_bytes, decode_work
from undertow.planner.serving.decode_text import decode_document, decode_text
from undertow.planner.serving.replicas import best_format, bucket_bytes, plan_replicas, plan_rollout, refusal
from undertow.planner.serving.room import active_bytes, weights_bytes
from undertow.planner.serving.serve import plan_serve

FLASH, PRO = ModelConfig.from_preset("v4-flash"), ModelConfig.from_preset("v4-pro")


def pool(text: str):
    return parse_cluster(text)[0]


@pytest.mark.parametrize(
    ("config", "gpus", "widths", "idle", "form"),
    [
        (FLASH, "8xH200", (2, 4, 4, 1), 0, "fp8"),
        (FLASH, "8xMI308X", (4, 2, 2, 1), 0, "fp8"),
        (FLASH, "8xMI355X", (8, 1, 1, 1), 0, "fp4"),
        (FLASH, "7xH200", (1, 4, 4, 1), 3, "fp8"),
        (PRO, "8xB200", (1, 8, 8, 1), 0, "fp4"),
        (PRO, "16xH200", (1, 16, 16, 1), 0, "fp8"),
    ],
)
def test_the_narrowest_replica_that_fits(config, gpus, widths, idle, form):
    found = plan_replicas(config, pool(gpus), 4096)
    geometry = found.geometry
    assert (found.replicas, geometry.tensor, geometry.expert, geometry.data) == widths
    assert found.idle == idle and found.serving.form == form == best_format(found.pool.gpu) and found.fits


def test_widths_that_are_given():
    found = plan_replicas(FLASH, pool("16xH100"), 4096, tensor=2, expert=8)
    assert (found.geometry.gpus, found.geometry.data, found.replicas) == (8, 4, 2)
    # Each data-parallel rank has caches of its own.
    assert found.sequences == 2 * 4 * found.serving.sequences
    assert plan_replicas(FLASH, pool("8xH200"), 4096, tensor=8).geometry.expert == 8


def test_what_a_length_takes():
    found = plan_replicas(FLASH, pool("8xH200"), 16_384)
    assert [at.length for at in found.lengths] == [4096, 16_384, 32_768, 131_072, 1_048_576]
    for at in found.lengths:
        assert at.sequence_bytes == CacheBytes(FLASH, online=True).of_length(at.length)
        assert at.sequences == 2 * (found.serving.room // at.sequence_bytes)
        assert at.flops_per_token == decode_work(FLASH, at.length).total
        read = active_bytes(FLASH, "fp8", found.geometry) + cache_read_bytes(found.serving.cache, at.length)
        assert at.least_seconds == pytest.approx(read / 4.8e12)
    assert found.lengths[-1].sequences == 26


def test_a_step_of_all_sequences_reads_all_experts_or_computes():
    found = plan_replicas(FLASH, pool("8xH200"), 4096)
    at, each = found.at(4096), found.serving.sequences
    assert each == 2619 and active_bytes(FLASH, "fp8", found.geometry, each) == pytest.approx(
        weights_bytes(FLASH, "fp8", found.geometry, mtp=False), rel=0.01
    )
    read = active_bytes(FLASH, "fp8", found.geometry, each) + each * cache_read_bytes(found.serving.cache, 4096)
    assert at.least_seconds_full == pytest.approx(read / 4.8e12) == pytest.approx(0.0219, abs=1e-4)
    # With bandwidth to spare the operations bind.
    fast = replace(found, pool=Pool(8, replace(found.pool.gpu, bandwidth=1e15)))
    work = each * at.flops_per_token / (4 * found.pool.gpu.fp8)
    assert fast.at(4096).least_seconds_full == pytest.approx(work) == pytest.approx(0.0096, abs=1e-4)


def test_experts_that_many_tokens_need():
    one, dense = active_bytes(FLASH, "bf16"), active_bytes(FLASH, "bf16", tokens=0)
    experts = active_bytes(FLASH, "bf16", tokens=10**6) - dense
    assert (one - dense) / experts == pytest.approx(6 / 256)
    assert (active_bytes(FLASH, "bf16", tokens=64) - dense) / experts == pytest.approx(1 - (250 / 256) ** 64)


def test_cache_that_a_token_reads():
    cache = CacheBytes(FLASH)
    # 43 windows of 128; in 21 CSA layers 512 of 1,024 entries and all their keys; in 20 HCA layers 32 entries.
    assert cache_read_bytes(cache, 4096) == 584 * (43 * 128 + 21 * 512 + 20 * 32) + 132 * 21 * 1024


def test_weights_that_a_token_reads():
    whole = weights_bytes(FLASH, "bf16", mtp=False)
    active = active_bytes(FLASH, "bf16")
    experts = 2 * 43 * 256 * 3 * 4096 * 2048
    table = 2 * 129_280 * 4096
    assert active == pytest.approx(whole - experts - table + experts * 6 / 256, rel=1e-3)
    assert active == pytest.approx(2 * 13.26e9, rel=0.01)


def test_buffers_for_new_weights():
    assert bucket_bytes(FLASH) == 2 * 129_280 * 4096
    assert bucket_bytes(ModelConfig.from_preset("v4-tiny")) == 256 << 20
    rollout = plan_rollout(FLASH, pool("8xMI355X"), 16_384)
    assert rollout.serving.form == "fp8" and rollout.serving.update_buckets == 2 * bucket_bytes(FLASH)
    assert plan_replicas(FLASH, pool("8xMI355X"), 16_384).serving.update_buckets == 0


def test_what_does_not_fit():
    told = refusal(plan_replicas(FLASH, pool("1xH200"), 4096), "v4-flash")
    assert told and told.startswith(
        "v4-flash does not fit 1xH200: on each GPU of a replica of 1, weights in FP8 take 285.9"
    )
    short = plan_serve("v4-flash", "4xH200", length=1_048_576, memory_fraction=0.53)
    assert short.refusal and "a sequence of 1,048,576 tokens takes 4.0 GB of cache" in short.refusal


def test_a_serving_plan_as_text_and_values():
    plan = plan_serve("v4-flash", "8xH200", weights="fp4", cache="bf16")
    lines = [" ".join(line.split()) for line in str(plan).splitlines()]
    assert lines[0] == "v4-flash served on 8xH200: fits"
    assert "serving: H200 has no FP4 units; what it takes to widen the weights is left out" in lines
    assert any(line.startswith("cache in bf16: 6,880 bytes a token") for line in lines)
    document = json.loads(json.dumps(plan.json()))
    assert list(document) == ["parameters", "serving", "fits", "refusal", "uncalibrated"]
    serving = document["serving"]
    assert (serving["weights_format"], serving["cache_format"], serving["replicas"]) == ("fp4", "bf16", 4)
    assert serving["weights_bytes"] == plan.replicas.serving.weights and serving["cache_bytes_per_token"] == 6880
    assert [at["length"] for at in serving["lengths"]] == [4096, 32_768, 131_072, 1_048_576]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": "8xH200+8xH200"}, "gpus '8xH200+8xH200': 2 pools; a serving plan is for one"),
        ({"weights": "fp16"}, "unknown weight format 'fp16'; did you mean 'fp4'|unknown weight format 'fp16'"),
        ({"cache": "int4"}, "unknown cache format 'int4'"),
        ({"memory_fraction": 0.0}, "memory_fraction is 0.0; allowed: above 0, at most 1"),
        ({"length": 0}, "length is 0; allowed: 1 to max_position_embeddings 1048576"),
        ({"tensor": 16}, "a replica of tensor 16 and expert 16 needs 16 GPUs, given 8xH200"),
        ({"tensor": 3, "expert": 6}, "tensor 3 does not divide num_attention_heads 64"),
        ({"expert": 5}, "expert 5 does not divide n_routed_experts 256"),
        ({"tensor": 0}, "tensor is 0; allowed: at least 1"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(ConfigError, match=message.replace("+", r"\+")) as caught:
        plan_serve("v4-flash", **{"gpus": "8xH200", **options})
    assert "\n" not in str(caught.value)


def test_decode_lines():
    lines = decode_text(FLASH, 4096)
    assert lines[0] == "decode, cache in fp8: 3,850 bytes a token of context, and 4.82 MiB a sequence"
    assert lines[1] == "  4,096 tokens: 19.9 MiB of cache, 29.1 GFLOP a token"
    assert lines[3].startswith("  at 1,000,000, of DeepSeek-V3.2's: operations 10.0% by precision")
    assert lines[3].endswith("cache with FP4 indexer keys 7.3%") and len(lines) == 4
    document = decode_document(FLASH, 4096)
    assert [at["length"] for at in document["lengths"]] == [4096, 1_000_000]
    assert document["of_v32"]["cache"] == pytest.approx(0.073, abs=5e-4)
    tiny = ModelConfig.from_preset("v4-tiny")
    assert len(decode_text(tiny, 512)) == 2 and decode_document(tiny, 512)["of_v32"] is None
