"""Values from the command line and from variables."""

import pytest

from undertow.config.errors import ConfigError
from undertow.config.layer import Entry, Rank, nested
from undertow.config.overrides import command_line, variables


def test_words_are_typed_and_the_later_wins():
    words = ["train.steps=1", "ops.linear=triton", "train.steps=5", "out=a=b", "model.compress_ratios=[0, 4]", "x= "]
    assert nested(command_line(words)) == {
        "train": {"steps": 5},
        "ops": {"linear": "triton"},
        "out": "a=b",
        "model": {"compress_ratios": [0, 4]},
        "x": "",
    }
    assert command_line(words)["train.steps"] == Entry(5, "command line", Rank.COMMAND_LINE)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train.steps", "command line: 'train.steps' is not of the form section.key=value, such as train.steps=100"),
        ("=3", "command line: '' is not a key; write section.key, such as train.steps"),
        ("train.=3", "command line: 'train.' is not a key; write section.key, such as train.steps"),
        ("a..b=3", "command line: 'a..b' is not a key; write section.key, such as train.steps"),
    ],
)
def test_bad_words(word, message):
    with pytest.raises(ConfigError) as error:
        command_line([word])
    assert str(error.value) == message


def test_variables_name_the_key():
    environment = {"UNDERTOW__TRAIN__BATCH_SIZE": "4", "UNDERTOW__SEED": "3", "UNDERTOW_DEVICE": "cpu", "PATH": "/bin"}
    layer = variables(environment)
    assert nested(layer) == {"train": {"batch_size": 4}, "seed": 3}
    assert layer["seed"] == Entry(3, "environment UNDERTOW__SEED", Rank.ENVIRONMENT)


def test_bad_variable():
    with pytest.raises(ConfigError, match=r"^environment UNDERTOW__: '' is not a key; "):
        variables({"UNDERTOW__": "1"})
