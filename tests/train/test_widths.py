"""What a run refuses of parallelism: planned alone, before anything is read or allocated."""

from __future__ import annotations

import pytest

from undertow.config.errors import ConfigError
from undertow.config.resolve import resolve
from undertow.train.widths import refuse_wider


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("parallel.tensor=2", "parallel.tensor is 2: it can be planned (undertow plan), but this version trains"),
        ("parallel.pipeline=4", "parallel.pipeline is 4: "),
        ("parallel.expert=8", "parallel.expert is 8: it can be planned (undertow plan), but one process was"),
        ("parallel.context=2", "parallel.context is 2: "),
        ("parallel.gpus=2xH200", "parallel.gpus is 2xH200: "),
        ("parallel.schedule=zbv", "parallel.schedule is zbv: "),
        ("parallel.layout=Et*3|t*3mL", "parallel.layout is 'Et*3|t*3mL': "),
        ("parallel.layout=[[embedding],[decoder,loss]]", 'parallel.layout is [["embedding"], ["decoder", "loss"]]: '),
    ],
)
def test_what_can_only_be_planned(word, message):
    resolved = resolve("pretrain/quickstart", [word], {})
    with pytest.raises(ConfigError) as refusal:
        refuse_wider(resolved.tracked)
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)
    assert refusal.value.exit_code == 2


def test_one_stage_on_one_gpu_is_a_run():
    resolved = resolve(
        "pretrain/quickstart", ["parallel.layout=Et*6mL", "parallel.pipeline=1", "parallel.gpus=1xH200"], {}
    )
    refuse_wider(resolved.tracked)
    written = ("parallel.gpus", "parallel.tensor", "parallel.pipeline", "parallel.layout", "parallel.schedule")
    assert all(resolved._view.was_read(key) for key in written)


def test_a_long_value_is_told_in_part():
    resolved = resolve("pretrain/quickstart", [f"parallel.layout=[{','.join(['[decoder]'] * 1000)}]"], {})
    with pytest.raises(ConfigError) as refusal:
        refuse_wider(resolved.tracked)
    assert len(str(refusal.value)) < 500 and "characters): it can be planned" in str(refusal.value)


@pytest.mark.parametrize(
    ("ranks", "words", "message"),
    [
        (2, ["parallel.gpus=8xH200"], "parallel.gpus is 8xH200: it can be planned (undertow plan), but 2 "),
        (4, ["parallel.shard=3"], "shard 3 does not divide the 4 data-parallel ranks; allowed: 1, 2, 4"),
        (4, ["parallel.expert=8"], "expert 8 does not divide the 4 ranks of a stage"),
        (3, ["parallel.expert=3"], "expert 3 does not divide n_routed_experts 8"),
        (4, [], "train.batch_size 2: 4 data-parallel ranks take as many sequences each; give a multiple of 4"),
        (2, ["train.batch_size_schedule=[[5,4],[9,7]]"], "train.batch_size_schedule 7: 2 data-parallel ranks take"),
    ],
)
def test_what_so_many_ranks_cannot_share(ranks, words, message):
    resolved = resolve("pretrain/quickstart", words, {})
    with pytest.raises(ConfigError) as refusal:
        refuse_wider(resolved.tracked, ranks)
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


def test_ranks_that_share_are_a_run():
    resolved = resolve("pretrain/quickstart", ["parallel.gpus=2xH200", "parallel.expert=2", "parallel.shard=1"], {})
    refuse_wider(resolved.tracked, 2)
    assert resolved._view.was_read("parallel.shard")


PIPELINE = ["parallel.pipeline=2", "train.batch_size=8", "train.micro_batch_size=1"]


@pytest.mark.parametrize(
    ("ranks", "words", "message"),
    [
        (2, ["train.micro_batch_size=3"], "train.batch_size 8: each data-parallel rank has 8 sequences, which "),
        (2, ["train.micro_batch_size=8"], "parallel.schedule 1f1b: 1 micro-batches of a step on each data-parallel "),
        (2, ["train.batch_size_schedule=[[9,1]]"], "parallel.schedule 1f1b: 1 micro-batches of a step on each "),
        (2, ["parallel.schedule=zb-h1", "recompute.layers=all"], "parallel.schedule zb-h1 splits the backward pass"),
        (2, ["parallel.layout=Et|t|t|tmL"], "parallel.schedule 1f1b takes 1 stages on each rank; layout "),
        (2, ["parallel.layout=Et*2|t*3mL"], "layout 'Et*2|t*3mL', stages 0 to 1: 5 t (2, 3 by stage); the model has 4"),
        (3, [], "3 GPUs are not a multiple of tensor 1 x pipeline 2 x context 1 = 2"),
    ],
)
def test_a_pipeline_that_cannot_run_is_refused(ranks, words, message):
    resolved = resolve("pretrain/quickstart", [*PIPELINE, *words], {})
    with pytest.raises(ConfigError) as refusal:
        refuse_wider(resolved.tracked, ranks)
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "words", [[], ["parallel.schedule=zbv"], ["parallel.schedule=interleaved", "recompute.layers=all"]]
)
def test_a_pipeline_that_can_run_is_a_run(words):
    refuse_wider(resolve("pretrain/quickstart", [*PIPELINE, *words], {}).tracked, 4)
