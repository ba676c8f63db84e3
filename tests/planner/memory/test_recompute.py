"""What is computed again, as a value, as text and as plain values."""

from __future__ import annotations

import pytest

import undertow
from undertow.config.errors import ConfigError
from undertow.config.layout import parse_layout
from undertow.planner.memory.recompute import MODULES, NONE, Recompute, ranges, read_recompute, recompute_of

LAYOUT = parse_layout("Et*10|t*12|t*12|t*9mL")
ALL = range(43)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", NONE),
        ("all", Recompute.of(ALL)),
        ("0,4, 10-12", Recompute.of((0, 4, 10, 11, 12))),
        ("first:2", Recompute.of((0, 1, 10, 11, 22, 23, 34, 35))),
        ("query:0-10", Recompute.of(query=range(11))),
        ("expert_activation:all; query : 0-1", Recompute.of(expert_activation=ALL, query=(0, 1))),
        ("moe:first:1 0,1", Recompute.of((0, 1), moe=(10, 22, 34))),
        ("query:none", NONE),
        ("42; output:all;", Recompute.of((42,), output=range(42))),
    ],
)
def test_text(text, expected):
    found = read_recompute(text, LAYOUT)
    assert found == expected == read_recompute(str(found), LAYOUT)


def test_printed():
    value = Recompute.of((7, 0, 1, 2), query=(5, 4), moe=(4,))
    assert str(value) == "0-2, 7; query:4-5; moe:4" and str(NONE) == "none"
    assert value.json() == {"layers": [0, 1, 2, 7], "modules": {"query": [4, 5], "moe": [4]}}
    assert ranges(()) == "none" and ranges({3, 1, 2, 9}) == "1-3, 9"
    assert (len(value), bool(value), bool(NONE)) == (7, True, False)
    assert value.touched == {0, 1, 2, 4, 5, 7} and value.by_layer[4] == {"query", "moe"}
    assert Recompute.union([Recompute.of((1,)), Recompute.of(query=(2,))]) == Recompute.of((1,), query=(2,))


def test_as_asked():
    assert recompute_of([3, 1, 1], LAYOUT) == Recompute.of((1, 3)) and recompute_of([], LAYOUT) == NONE
    value = Recompute.of(moe=(1,))
    assert recompute_of(value, LAYOUT) is value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "recompute '': '' is no layer number; write none, all, 0,4,10-12, or first:3 of each stage"),
        ("99", "recompute '99': layer 99 is none of this model's, 0 to 42"),
        ("5-2", "recompute '5-2': the range 5-2 runs backwards"),
        ("first:x", "recompute 'first:x': 'x' is no layer number; write none, all"),
        (
            "qery:all",
            "recompute 'qery:all': unknown module 'qery'; did you mean 'query'? (modules: mixer_norm, query, ",
        ),
        ("query:", "recompute 'query:': '' is no layer number"),
        ("query:43", "recompute 'query:43': layer 43 is none of this model's, 0 to 42"),
        (
            "moe:0-3;shared_expert:3",
            "recompute 'moe:0-3;shared_expert:3': layer 3: moe is recomputed, and shared_expert, which is a part of it",
        ),
    ],
)
def test_mistakes(text, message):
    with pytest.raises(ConfigError) as caught:
        read_recompute(text, LAYOUT)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_a_value_names_each_layer_once():
    with pytest.raises(ConfigError, match="layer 3 is recomputed whole, and its query besides; name one of the two"):
        Recompute.of((3,), query=(3,))
    with pytest.raises(ConfigError, match="unknown module 'attention'; did you mean 'attention_core'"):
        Recompute.of(attention=(3,))
    assert len(MODULES) == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"schedule": "zb-h1", "recompute": "all"},
            "schedule zb-h1 splits the backward pass, so layers 0-42 cannot be",
        ),
        (
            {"implementation": "tight", "recompute": "mixer_norm:0-4"},
            "implementation tight computes its mixer_norm again",
        ),
        (
            {"implementation": "primus", "recompute": "expert_activation:all"},
            "implementation primus computes its expert_activation again in any case, given expert_activation:0-42; its "
            "modules are mixer_norm, query, attention_core, output, shared_expert, moe",
        ),
    ],
)
def test_plans_that_cannot_be(options, message):
    with pytest.raises(ConfigError) as caught:
        undertow.plan("v4-flash", "32xMI355X", pipeline=4, **options)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_a_plan_with_modules():
    plain, again = (
        undertow.plan("v4-flash", "32xMI355X", pipeline=4, recompute=text) for text in ("none", "query:all; moe:0-9")
    )
    assert again.json()["recompute"] == {"layers": [], "modules": {"query": [*ALL], "moe": [*range(10)]}}
    assert "recomputed layers query:0-42; moe:0-9" in str(again)
    assert again.memory.stages[0].total_bytes < plain.memory.stages[0].total_bytes - 50e9
    assert again.timeline.seconds > plain.timeline.seconds


def test_a_long_text_is_told_in_part():
    with pytest.raises(ConfigError) as refusal:
        read_recompute("0," * 5000 + "x", LAYOUT)
    assert len(str(refusal.value)) < 500
