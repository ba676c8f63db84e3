"""The smallest clusters and the most that a cluster holds, against trying everything."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from undertow.config.clusters import Pool
from undertow.config.errors import ConfigError
from undertow.config.gpus import GPUS
from undertow.planner.capacity import clusters
from undertow.planner.capacity.clusters import cluster_sizes, expert_widths, smallest_clusters
from undertow.planner.capacity.fit import fit_of
from undertow.planner.capacity.fit_plan import names_gpus_alone, plan_fit
from undertow.planner.capacity.largest import plan_largest
from undertow.planner.choice import Options, candidates, choose
from undertow.planner.subject import read_subject
from undertow.planner.tuner.tuning import Bounds

BY_NAME = {gpu.name: gpu for gpu in GPUS}


def subject(count: int):
    return read_subject("v4-flash", count, (), {})


def fits(count: int, gpu: str, options: Options) -> bool:
    try:
        task, layout, recompute = choose(subject(count), Pool(count, BY_NAME[gpu]), options)
    except ConfigError:
        return False
    return task.memory(layout, recompute).fits


def test_sizes_are_parts_of_a_machine_and_then_machines():
    assert cluster_sizes(32) == (1, 2, 4, 8, 16, 24, 32) and cluster_sizes(2) == (1, 2)
    assert cluster_sizes()[-1] == 4096


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pipeline": 3},
        {"pipeline": 5, "expert": 4},
        {"tensor": 2, "micro_batch": 4},
        {"global_batch": 96},
        {"state": "adamw-fp32"},
        {"state": "published-muon", "offload_optimizer": True},
        {"schedule": "interleaved", "pipeline": 4},
        {"context": 2, "sequence_length": 16_384},
    ],
)
def test_the_smallest_is_the_first_that_a_plan_fits(options):
    gpus, most, bounds = ("H200", "MI355X"), 40, Bounds(margin=0)
    found = smallest_clusters(
        subject, [BY_NAME[name] for name in gpus], Options(**options), largest=most, bounds=bounds
    )
    assert [(row.gpu.name, row.recompute) for row in found] == [(g, r) for g in gpus for r in ("none", "all")]
    for row in found:
        given = Options(**options, recompute=row.recompute)
        experts = (None, 16, 32) if given.expert is None else (given.expert,)
        first = next(
            (
                n
                for n in cluster_sizes(most)
                if any(fits(n, row.gpu.name, replace(given, expert=expert)) for expert in experts)
            ),
            None,
        )
        assert (row.fit and row.fit.task.geometry.gpus) == first
        if row.fit:
            assert row.fit.memory.fits and row.fit.task.pool == Pool(first, row.gpu)
            assert row.fit.memory.limit_bytes == row.gpu.memory
        if row.shortage:
            assert row.shortage.rank.total_bytes > row.shortage.limit_bytes == row.gpu.memory
            assert row.shortage.gpus < (first or most + 1)


def _unbounded(gpu: str, options: Options):
    return smallest_clusters(subject, [BY_NAME[gpu]], options, bounds=Bounds(margin=0))


def test_larger_clusters_need_not_fit():
    found = {row.recompute: row for row in _unbounded("H200", Options(pipeline=3))}
    assert found["all"].fit and found["all"].fit.task.geometry.gpus == 24
    assert not fits(32, "H200", Options(pipeline=3, recompute="all"))


def test_many_microbatches_take_as_long_as_if_all_were_simulated():
    task, layout, recompute = choose(subject(64), Pool(64, BY_NAME["MI355X"]), Options(pipeline=8, tensor=1))
    assert task.microbatches == 64 and fit_of(task, layout, recompute).seconds == pytest.approx(
        float(task.timeline(layout, recompute).seconds), rel=1e-3
    )


def test_zbv_is_simulated_as_a_plan_is():
    options = Options(schedule="zbv", tensor=2, pipeline=8, expert=8)
    (row,) = plan_fit("v4-flash", "MI355X", options, largest=128).rows
    assert row.fit and row.fit.task.microbatches == 128
    task, layout, recompute = choose(subject(row.fit.task.pool.count), row.fit.task.pool, options)
    assert row.fit.task.geometry == task.geometry and str(row.fit.layout) == str(layout)
    assert row.fit.seconds == float(task.timeline(layout, recompute).seconds)


@pytest.mark.parametrize(
    ("bounds", "limit", "gpus"),
    [(Bounds(margin=0), 141_000_000_000, 24), (None, 133_950_000_000, 32), (Bounds(memory_limit=80), 76 * 10**9, 48)],
)
def test_memory_that_may_be_taken(bounds, limit, gpus):
    found = plan_fit("v4-flash", "H200", Options(recompute="none"), bounds=bounds)
    (row,) = found.rows
    assert row.fit and row.fit.memory.fits and row.fit.memory.limit_bytes == limit
    assert row.fit.task.geometry.gpus == gpus and found.json()["margin"] == (0 if gpus == 24 else 0.05)
    assert ("memory: no margin is kept for what is left out" in found.uncalibrated) == (gpus == 24)


def test_a_margin_that_cannot_be():
    with pytest.raises(ConfigError, match="margin is 1; allowed"):
        plan_fit("v4-flash", "H200", bounds=Bounds(margin=1))


def test_expert_parallelism_beyond_a_machine():
    assert expert_widths(64, 256) == [8, 16, 32] and expert_widths(24, 256) == [8] and expert_widths(12, 384) == [6]
    given = Options(state="published-fp32", recompute="none")
    usual, any_width = (plan_fit("v4-pro", "MI355X", replace(given, expert=width), largest=192) for width in (8, None))
    sizes = [found.rows[0].fit.task.geometry.gpus for found in (usual, any_width) if found.rows[0].fit]
    assert sizes == [168, 128] and " 32 * tight " in " ".join(str(any_width).split())


def test_a_gpu_that_is_too_small_builds_few_ways(monkeypatch):
    built = []
    monkeypatch.setattr(clusters, "candidates", lambda *given: built.append(given) or candidates(*given))
    tiny = replace(BY_NAME["H200"], name="W1", memory=10**9)
    found = smallest_clusters(subject, [tiny], Options(recompute="none"), largest=1024)
    assert all(row.fit is None and row.shortage for row in found) and len(built) < 800


def test_the_fastest_way_is_told():
    (row, _) = _unbounded("MI355X", Options())
    assert row.fit and row.fit.task.geometry.gpus == 16
    pool = Pool(16, BY_NAME["MI355X"])
    for task, layout, recompute in candidates(subject(16), pool, Options(recompute="none"), []):
        if task.memory(layout, recompute).fits:
            assert fit_of(task, layout, recompute).seconds >= row.fit.seconds * 0.99


@pytest.fixture(scope="module")
def flash():
    return plan_fit("v4-flash")


def test_flash_on_the_catalogue(flash):
    sizes = {(row.gpu.name, row.recompute): row.fit.task.geometry.gpus for row in flash.rows}
    assert {name for name, _ in sizes} == set(BY_NAME) and flash.fits and flash.refusal is None
    expected = {"MI300X": 24, "MI308X": 24, "MI325X": 16, "MI355X": 16, "H100": 48, "H200": 32, "B200": 24, "GB300": 16}
    assert sizes == {(name, again): count for name, count in expected.items() for again in ("none", "all")}


def test_text_and_document_of_the_answer(flash):
    text = [" ".join(line.split()) for line in str(flash).splitlines()]
    assert text[0] == "v4-flash: the smallest clusters that train it, up to 4,096 GPUs"
    assert text[1].startswith(
        "8 sequences a GPU and step, of 4,096 tokens, micro-batch 1, schedule 1f1b, state published"
    )
    assert "H200 24 none 2 140.9 133.9 optimizer state 81.3" in text
    document = json.loads(json.dumps(flash.json()))
    assert (
        list(document) == ["fit", "largest_gpus", "largest_expert", "margin", "fits", "refusal", "uncalibrated"]
        and len(document["fit"]) == 16
    )
    row = document["fit"][0]
    assert (row["gpu"], row["recompute"], row["gpus"], row["batch_size"]) == ("MI300X", "none", 24, 192)
    assert row["peak_bytes"] <= row["limit_bytes"] == 182_400_000_000
    assert row["shortage"]["gpus"] == 16 and row["shortage"]["term"] == "optimizer state"
    assert row["tokens_per_second_per_gpu"] == pytest.approx(192 * 4096 / row["seconds_per_iteration"] / 24)


def test_what_fits_nowhere_says_what_binds():
    found = plan_fit("v4-flash", "H100", Options(sequence_length=262_144), largest=128)
    assert not found.fits and found.refusal
    assert found.refusal.startswith(
        "v4-flash fits no cluster of up to 128 GPUs: on 128xH100, recomputing all, a GPU of"
    )
    assert "GB, the most for '" in found.refusal and "\n" not in found.refusal
    assert "H100 none none - -" in " ".join(str(found).split())
    assert found.json()["fit"][0]["gpus"] is None


def test_what_cannot_be_shared_out_is_a_mistake():
    with pytest.raises(ConfigError, match="tensor 3 does not divide num_attention_heads 64"):
        plan_fit("v4-flash", "H100", Options(tensor=3))
    with pytest.raises(ConfigError, match="pipeline is 0; allowed: at least 1"):
        plan_fit("v4-flash", "H100", Options(pipeline=0))


def test_gpus_by_name_or_by_number():
    assert [names_gpus_alone(text) for text in (None, "H200", "H200+MI355X", "8xH200", "H200+8xH200")] == [
        True, True, True, False, False,
    ]  # fmt: skip
    assert {row.gpu.name for row in plan_fit("v4-tiny", "H200+MI355X").rows} == {"H200", "MI355X"}
    assert all(row.fit.task.geometry.gpus == 1 for row in plan_fit("v4-tiny", "H200").rows)


@pytest.mark.parametrize("again", ["none", "all"])
def test_the_largest_micro_batch(again):
    pool, bounds = Pool(32, BY_NAME["MI355X"]), Bounds(margin=0)
    found = {(row.what, row.recompute): row for row in plan_largest("v4-flash", "32xMI355X", bounds=bounds).rows}
    fitting = [
        (size, -task.geometry.tensor)
        for size in (1, 2, 4, 8, 16, 32, 64, 128, 256)
        for task, layout, recompute in candidates(subject(32), pool, Options(micro_batch=size, recompute=again), [])
        if task.memory(layout, recompute).fits
    ]
    row = found["micro-batch", again]
    assert row.fit and (row.value, -row.fit.task.geometry.tensor) == max(fitting)
    assert row.fit.task.batch.micro_batch == row.value and row.fit.memory.fits


def test_the_longest_sequence():
    found = plan_largest("v4-flash", "32xMI355X", Options(recompute="all"), bounds=Bounds(margin=0))
    row = found.rows[1]
    assert row.what == "sequence length" and row.value and row.value % 128 == 0
    assert row.fit and row.fit.memory.fits
    longer = Options(recompute="all", sequence_length=row.value + 128)
    for task, layout, recompute in candidates(subject(32), Pool(32, BY_NAME["MI355X"]), longer, []):
        assert not task.memory(layout, recompute).fits


def test_the_most_is_looked_for_over_tensor_widths_and_keeps_a_margin():
    every = (None, 1, 2, 4, 8)
    widths = {n: plan_largest("v4-flash", "64xH200", Options(tensor=n, recompute="all")) for n in every}
    for at, row in enumerate(widths[None].rows):
        each = {tensor: found.rows[at].value or 0 for tensor, found in widths.items() if tensor}
        assert row.fit and row.value == max(each.values()) == each[row.fit.task.geometry.tensor]
        assert row.fit.memory.limit_bytes == int(141e9 * 0.95)
    assert [row.value for row in widths[None].rows] == [128, 360_192]


def test_a_cluster_that_is_too_small():
    found = plan_largest("v4-flash", "8xH200")
    assert not found.fits and found.refusal and found.refusal.startswith("v4-flash fits 8xH200 with no micro-batch")
    with pytest.raises(ConfigError, match="2 pools; allowed: one"):
        plan_largest("v4-flash", "8xH200+8xH200")
