"""The resolved configuration as text: round trip, sources, JSON and difference."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from undertow.config.dump import diff_json, diff_text, differences, to_json, to_yaml, values_of
from undertow.config.resolve import resolve
from undertow.config.scalars import shown


def test_yaml_names_the_source_of_each_value(write):
    path = write("a.yaml", "model: {preset: v4-tiny, index_topk: 16}\ntrain: {learning_rate: 1e-3}\nout: ${O:runs/a}\n")
    text = to_yaml(resolve(path, ["seed=3"], {"O": "runs/b"}))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[:2] == ["model:", "preset: v4-tiny # a.yaml:1"]
    for line in (
        "index_topk: 16 # a.yaml:1",
        "compress_ratios: [0, 4, 64, 4, 0] # preset v4-tiny",
        "learning_rate: 0.001 # a.yaml:2",
        "steps: 300 # default",
        "ops: {} # default",
        'fp8: "off" # default',
        "seed: 3 # command line",
        "out: runs/b # environment O (a.yaml:3)",
    ):
        assert line in lines


def test_every_value_has_a_source():
    resolved = resolve(None, ["model=v4-tiny", "ops.linear=triton"], {})
    assert list(values_of(resolved)) == list(resolved.sources)


@pytest.mark.parametrize("model", ["v4-flash", "v4-pro", "v4-proxy", "v4-small", "v4-tiny", "v4-debug"])
def test_dump_is_a_recipe_with_the_same_result(write, model):
    overrides = [
        f"model={model}",
        "model.rms_norm_eps=1e-5",
        "train.learning_rate=1.0",
        "ops.linear=triton",
        "recompute.modules.query=all",
        "optimizations.attention=off",
        "optimizations.fp8=on",
        "attention.csa_backend=triton",
    ]
    first = resolve(None, overrides, {})
    path = write("config.yaml", to_yaml(first))
    second = resolve(path, [], {})
    assert (second.config, second.preset) == (first.config, first.preset)
    assert set(second.sources.values()) == {f"config.yaml:{n}" for n in _value_lines(path)}


def _value_lines(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    return [number for number, line in enumerate(lines, 1) if "  # " in line]


@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=60),
    rate=st.floats(1e-30, 1e30),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_and_number_survive_the_round_trip(write, text, rate):
    overrides = ["model=v4-debug", f"out={shown(text)}", f"train.learning_rate={rate!r}", "train.min_learning_rate=0"]
    first = resolve(None, overrides, {})
    assert (first.config.out, first.config.train.learning_rate) == (text, rate)
    assert resolve(write("config.yaml", to_yaml(first)), [], {"X": "1"}).config == first.config


def test_text_with_a_variable_in_it_is_not_expanded_again(write):
    first = resolve(None, ["model=v4-debug", "out=a/$${X}/${X}"], {})
    assert first.config.out == "a/$${X}/${X}"
    assert resolve(write("config.yaml", to_yaml(first)), [], {"X": "1"}).config.out == "a/$${X}/${X}"


def test_unbuilt_families_are_explained():
    text = to_yaml(resolve(None, ["model=v4-debug", "optimizations.layout=on"], {}))
    told = "# optimizations.layout is on but not built yet: a launch refuses it. It needs "
    assert text.splitlines()[-1] == told + "a pipeline of more than one stage."


def test_json():
    entries = json.loads(to_json(resolve(None, ["model=v4-tiny", "train.steps=3"], {})))
    assert entries["train.steps"] == {"value": 3, "source": "command line"}
    assert entries["model.compress_ratios"] == {"value": [0, 4, 64, 4, 0], "source": "preset v4-tiny"}
    assert entries["model.preset"] == {"value": "v4-tiny", "source": "command line"}


def test_difference(write):
    left = resolve(None, ["model=v4-debug", "ops.linear=triton"], {})
    right = resolve(write("a.yaml", "model: v4-debug\ntrain: {steps: 5}\n"), [], {})
    assert differences(left, right) == {
        "train.steps": {"left": {"value": 300, "source": "default"}, "right": {"value": 5, "source": "a.yaml:2"}},
        "ops.linear": {"left": {"value": "triton", "source": "command line"}, "right": None},
        "ops": {"left": None, "right": {"value": {}, "source": "default"}},
    }
    assert diff_text(left, right).splitlines() == [
        "train.steps: 300 (default) -> 5 (a.yaml:2)",
        "ops.linear: triton (command line) -> -",
        "ops: - -> {} (default)",
    ]
    assert json.loads(diff_json(left, right)) == differences(left, right)


def test_no_difference_is_empty():
    resolved = resolve(None, ["model=v4-debug"], {})
    assert (differences(resolved, resolved), diff_text(resolved, resolved)) == ({}, "")
