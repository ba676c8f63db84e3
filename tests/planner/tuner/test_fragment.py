"""A choice as YAML: keys that a recipe takes, values as they were chosen."""

from __future__ import annotations

import pytest

from undertow.config.errors import ConfigError
from undertow.config.layout import parse_layout
from undertow.config.resolve import resolve
from undertow.planner.geometry import Batch, build_geometry
from undertow.planner.memory.recompute import Recompute
from undertow.planner.tuner.fragment import fragment_of

LAYOUT = parse_layout("Et*10|t*12|t*12|t*9mL")


def test_every_key_is_set(tmp_path):
    again = Recompute.of((0, 3), query=(1, 2), moe=(5,))
    geometry = build_geometry(64, tensor=2, pipeline=4, expert=8)
    text = fragment_of(LAYOUT, "zb-h1", geometry, Batch(256, 4096, 2), again)
    recipe = tmp_path / "chosen.yaml"
    recipe.write_text("model: v4-flash\n" + text, encoding="utf-8")
    config = resolve(recipe, [], {}).config
    parallel, train = config.parallel, config.train
    assert (parallel.tensor, parallel.pipeline, parallel.expert, parallel.context) == (2, 4, 8, 1)
    assert (parallel.layout, parallel.schedule) == ("Et*10|t*12|t*12|t*9mL", "zb-h1")
    assert (train.batch_size, train.micro_batch_size, train.sequence_length) == (256, 2, 4096)
    assert config.recompute.layers == [0, 3] and config.recompute.modules == {"query": [1, 2], "moe": [5]}
    assert "#" not in text


def test_nothing_computed_again(tmp_path):
    text = fragment_of(LAYOUT, "1f1b", build_geometry(32, pipeline=4), Batch(256, 4096), Recompute())
    assert text.endswith("recompute:\n  layers: none\n  modules: {}\n")


def test_layers_out_of_the_model_are_refused():
    with pytest.raises(ConfigError) as refusal:
        resolve("pretrain/quickstart", ["recompute.modules.query=[9]"], {})
    assert str(refusal.value) == ("command line: recompute.modules.query [9]: layers are 0 to 3 in this model")
    words = ["recompute.modules.moe=all", "recompute.modules.shared_expert=[1,2]"]
    with pytest.raises(ConfigError) as refusal:
        resolve("pretrain/quickstart", words, {})
    wanted = "recompute.modules.shared_expert and moe of layer 1: moe contains shared_expert; name one of the two"
    assert str(refusal.value) == f"command line: {wanted}"
    resolve("pretrain/quickstart", [*words, "recompute.layers=[1,2]"], {})  # computed again whole
