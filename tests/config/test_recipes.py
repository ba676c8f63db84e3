"""The recipes that are shipped: each resolves, is short, and says what each key is."""

import re

import pytest

from undertow.config.paths import recipe_names, recipe_path
from undertow.config.resolve import resolve


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_resolves(name):
    assert resolve(name, [], {}).preset is not None


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_is_short_and_each_key_is_commented(name):
    lines = recipe_path(name).read_text(encoding="utf-8").splitlines()
    assert len(lines) < 60
    assert lines[0].startswith("# ")
    bare = [line for line in lines if re.match(r"\s*\w+: \S", line) and " # " not in line]
    assert [line for line in bare if not line.startswith("extends:")] == []


def test_quickstart_exercises_selection_on_any_machine():
    config = resolve("pretrain/quickstart", [], {}).config
    assert config.train.sequence_length > 4 * (config.model.index_topk + 1)
    assert (config.device, config.numerics.dtype, config.data.corpus) == ("auto", "float32", "plays")
    assert resolve("pretrain/quickstart", [], {"UNDERTOW_DEVICE": "cpu"}).config.device == "cpu"


def test_small_extends_quickstart():
    resolved = resolve("pretrain/small", [], {})
    assert resolved.preset == "v4-small"
    assert resolved.config.train.sequence_length > 4 * (resolved.config.model.index_topk + 1)
    assert re.search(r"pretrain/quickstart\.yaml:\d+$", resolved.sources["train.beta2"])
    assert re.search(r"pretrain/small\.yaml:\d+$", resolved.sources["train.steps"])
