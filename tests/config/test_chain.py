"""`extends`: order, relative paths, common ancestors, cycles."""

import pytest

from undertow.config.chain import read_chain
from undertow.config.errors import ConfigError
from undertow.config.layer import merge, nested
from undertow.config.paths import recipe_path


def chain(path, environment=None):
    return nested(merge(read_chain(path, environment or {})))


def test_child_wins_over_parent_over_grandparent(write):
    write("base/family.yaml", "train: {steps: 1, batch_size: 1, list: [1, 2]}\nseed: 1\n")
    write("base/variant.yaml", "extends: family.yaml\ntrain: {steps: 2, batch_size: 2}\n")
    path = write("experiment.yaml", "extends: base/variant.yaml\ntrain: {steps: 3, list: [9]}\n")
    assert chain(path) == {"train": {"steps": 3, "batch_size": 2, "list": [9]}, "seed": 1}


def test_parents_are_merged_in_the_order_named(write):
    write("a.yaml", "x: a\ny: a\nz: a\n")
    write("b.yaml", "x: b\ny: b\n")
    assert chain(write("c.yaml", "extends: [a.yaml, b.yaml]\nx: c\n")) == {"x": "c", "y": "b", "z": "a"}
    assert chain(write("c.yaml", "extends: [b.yaml, a.yaml]\nx: c\n")) == {"x": "c", "y": "a", "z": "a"}


def test_common_ancestor_does_not_undo_what_the_first_parent_changed(write):
    write("base.yaml", "x: base\ny: base\n")
    write("a.yaml", "extends: base.yaml\nx: a\n")
    write("b.yaml", "extends: base.yaml\ny: b\n")
    assert chain(write("c.yaml", "extends: [a.yaml, b.yaml]\n")) == {"x": "a", "y": "b"}


def test_parent_named_by_the_environment(write):
    write("a.yaml", "x: a\n")
    write("b.yaml", "x: b\n")
    path = write("c.yaml", "extends: ${BASE:a.yaml}\n")
    assert (chain(path), chain(path, {"BASE": "b.yaml"})) == ({"x": "a"}, {"x": "b"})


def test_a_shipped_recipe_by_its_name(write):
    shipped = chain(recipe_path("pretrain/v4-flash"))
    for name in ("pretrain/v4-flash", "pretrain/v4-flash.yaml"):
        assert chain(write("c.yaml", f"extends: {name}\nx: c\n")) == shipped | {"x": "c"}
    write("pretrain/v4-flash.yaml", "y: near\n")
    assert chain(write("c.yaml", "extends: pretrain/v4-flash.yaml\n")) == {"y": "near"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a": "extends: a.yaml\n"}, "a.yaml:1: extends goes in a circle: a.yaml -> a.yaml"),
        (
            {"a": "extends: b.yaml\n", "b": "\nextends: c.yaml\n", "c": "x: 1\n\nextends: [a.yaml]\n"},
            "c.yaml:3: extends goes in a circle: a.yaml -> b.yaml -> c.yaml -> a.yaml",
        ),
        ({"a": "x: 1\nextends: sub/b.yaml\n"}, "a.yaml:2: extends 'sub/b.yaml', but there is no file sub/b.yaml"),
        ({"a": "extends: 3\n"}, "a.yaml:1: extends is 3; allowed: a path or a list of paths"),
        ({"a": "extends: [1]\n"}, "a.yaml:1: extends is [1]; allowed: a path or a list of paths"),
        ({"a": "extends: null\n"}, "a.yaml:1: extends is null; allowed: a path or a list of paths"),
        ({"a": "extends: {b: c}\n"}, "a.yaml:1: extends is a mapping of keys; allowed: a path or a list of paths"),
    ],
)
def test_bad_chains_name_the_child(write, files, message):
    for name, text in files.items():
        write(f"{name}.yaml", text)
    with pytest.raises(ConfigError) as error:
        read_chain(write("a.yaml", files["a"]), {})
    assert str(error.value) == message


def test_a_chain_that_is_too_long(write):
    for number in range(40):
        write(f"c{number}.yaml", f"extends: c{number + 1}.yaml\n")
    with pytest.raises(ConfigError) as error:
        chain(write("c.yaml", "extends: c0.yaml\n"))
    assert str(error.value) == "c31.yaml:1: the chain of extends is too long; allowed: 32 files in a row"


@pytest.mark.parametrize(
    ("parent", "message"),
    [
        ("x" * 5000, f"a.yaml:1: extends '{'x' * 199}... (5002 characters), but there is no file"),
        ('"a\\0b"', "a.yaml:1: extends: text holds the character \\u0000"),
        ('"\\ud800"', "a.yaml:1: extends: text holds the character \\ud800"),
    ],
)
def test_a_parent_that_no_file_can_be(write, parent, message):
    with pytest.raises(ConfigError) as error:
        chain(write("a.yaml", f"extends: {parent}\n"))
    assert str(error.value).startswith(message)
