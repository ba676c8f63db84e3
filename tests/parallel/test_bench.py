"""Steps that are benched over ranks: one process' losses, an entry of each rank, the pipeline beside its simulation."""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import median

import pytest
import torch.distributed as dist

from undertow.bench.ranks import bench_ranks, rate_of_one
from undertow.bench.ranks_table import ranks_table
from undertow.bench.step import bench_step
from undertow.config.errors import InputError
from undertow.config.world import World

WORDS = ("device=cpu", "train.batch_size=4", "train.micro_batch_size=1", "train.sequence_length=32")


def over_ranks(*words, trace=None, beside=None):
    world = World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size())
    steps = 2 if trace is None else 1  # with the traced one as many as `alone` takes, so that the data are the same
    result = bench_ranks("v4-debug", [*WORDS, *words], steps, 0, trace, beside, {}, world)
    return json.dumps(result, allow_nan=False)


@pytest.fixture(scope="module")
def alone():
    return bench_step("v4-debug", WORDS, [], 2, 0, None, {})


def check(answers, alone):
    """What every answer has; the first, and its one setting."""
    first, second = map(json.loads, answers)
    assert first["ranks"] == second["ranks"] and first["settings"][0]["losses"] == second["settings"][0]["losses"]
    (setting,), (one,) = first["settings"], alone["settings"]
    taken = 3 + setting["steps"]
    assert setting["losses"] == pytest.approx(one["losses"][:taken], rel=1e-5) and len(setting["losses"]) == taken
    assert setting["gradient_norms"] == pytest.approx(one["gradient_norms"][:taken], rel=1e-4)
    assert (setting["tokens"], first["processes"], first["kind"], first["device"]) == (128, 2, "step", "cpu")
    assert [rank["rank"] for rank in first["ranks"]] == [0, 1]
    slowest = [max(of_step) for of_step in zip(*(rank["ms"] for rank in first["ranks"]), strict=True)]
    assert setting["ms"]["median"] == pytest.approx(median(slowest)) and len(slowest) == setting["steps"]
    assert setting["tokens_per_second"] == pytest.approx(128e3 / median(slowest))
    assert setting["tokens_per_second_per_rank"] == setting["tokens_per_second"] / 2
    per_token = setting["tflops"]["reported"] / setting["tokens_per_second_per_rank"]
    assert per_token == pytest.approx(one["tflops"]["reported"] / one["tokens_per_second"])
    for rank in first["ranks"]:
        assert rank["held_bytes"] is None and rank["communication"] is None  # a CPU tells neither
        assert rank["peak_bytes"] > rank["planned_bytes"] > 0
    assert setting["peak_memory"]["bytes"] == max(rank["peak_bytes"] for rank in first["ranks"])
    return first, setting


def test_experts_over_two_ranks(two, alone, tmp_path):
    one = tmp_path / "one.json"
    one.write_text(json.dumps(alone))
    result, setting = check(two.run(over_ranks, "parallel.expert=2", trace=tmp_path / "t.json", beside=one), alone)
    assert result["layout"]["axes"] == "shard 2, expert 2" and result["layout"]["parallel"]["expert"] == 2
    assert result["beside"]["tokens_per_second"] == alone["settings"][0]["tokens_per_second"]
    ratio = setting["tokens_per_second_per_rank"] / alone["settings"][0]["tokens_per_second"]
    assert result["beside"]["weak_scaling"] == pytest.approx(ratio)
    assert result["pipeline"] is None and "no rates of cpu" in result["plan"]["why"]
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] and len(os.listdir(tmp_path)) == 2
    table = ranks_table(result)
    assert "2 processes: shard 2, expert 2; TFLOP/s are those of one, tokens/s of one " in table
    assert f", {ratio:.1%} of the " in table and "communication: there are no kernels on a CPU" in table
    with pytest.raises(InputError, match="this is one of another kind, or of 2 processes"):
        one.write_text(json.dumps(result))
        rate_of_one(one)


def test_a_pipeline_beside_its_simulation(two, alone):
    result, _ = check(two.run(over_ranks, "parallel.pipeline=2"), alone)
    pipeline = result["pipeline"]
    assert (pipeline["schedule"], pipeline["microbatches"], len(pipeline["timeline"]["operations"])) == ("1f1b", 4, 2)
    for name in ("measured", "simulated"):
        assert len(pipeline[name]["bubble"]) == 2 and all(0 <= share < 1 for share in pipeline[name]["bubble"])
    assert pipeline["measured"]["seconds"] == pipeline["timeline"]["seconds"]
    assert f"pipeline {pipeline['layout']}, 1f1b, 4 micro-batches: " in ranks_table(result)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"settings": []}', '{"settings": [{"tokens_per_second": 1}]}'])
def test_a_file_of_one_process_that_is_none(tmp_path, content):
    path = Path(tmp_path, "one.json")
    if content is not None:
        path.write_text(content)
    with pytest.raises(
        InputError, match=r"--beside .*one\.json: the result file of undertow bench step in one process"
    ):
        rate_of_one(path)
