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
        ("parallel.expert=8", "parallel.expert is 8: "),
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
