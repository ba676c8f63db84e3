"""Variables in recipe values."""

import pytest

from undertow.config.errors import ConfigError
from undertow.config.interpolate import interpolate
from undertow.config.layer import Entry, Rank

PLACE = "a.yaml:3"


@pytest.mark.parametrize(
    ("set_to", "value"),
    [
        ("null", None),
        ("true", True),
        ("false", False),
        ("8", 8),
        ("3e-4", 3e-4),
        ("[1, 2]", [1, 2]),
        ("plays", "plays"),
        ("off", "off"),
        ("", ""),
        ('"8"', "8"),
        ("a b", "a b"),
    ],
)
def test_whole_value_is_typed_after_substitution(set_to, value):
    from_environment = interpolate("${X:unused}", PLACE, {"X": set_to})
    from_default = interpolate("${X:" + set_to + "}", PLACE, {})
    assert from_environment == Entry(value, "environment X (a.yaml:3)", Rank.ENVIRONMENT)
    assert from_default == Entry(value, PLACE, Rank.FILE)
    assert type(from_environment.value) is type(from_default.value) is type(value)


def test_inside_longer_text_it_stays_text():
    environment = {"USER_DIR": "/data", "N": "3"}
    entry = interpolate("${USER_DIR}/run-${N}/${K:1}", PLACE, environment)
    assert entry == Entry("/data/run-3/1", "environment USER_DIR, N (a.yaml:3)", Rank.ENVIRONMENT)
    assert interpolate("${N}0", PLACE, environment).value == "30"


def test_items_of_lists():
    entry = interpolate([1, "${N:2}", ["${M:3}"], "x${M:4}"], PLACE, {"N": "7"})
    assert entry == Entry([1, 7, [3], "x4"], "environment N (a.yaml:3)", Rank.ENVIRONMENT)


def test_value_from_the_environment_is_not_expanded_again():
    assert interpolate("${X}", PLACE, {"X": "${Y}"}).value == "${Y}"


def test_escape():
    assert interpolate("$${X}", PLACE, {"X": "1"}) == Entry("${X}", PLACE, Rank.FILE)
    assert interpolate("a$b and $${X} and ${X}", PLACE, {"X": "1"}).value == "a$b and ${X} and 1"


@pytest.mark.parametrize("value", [5, None, True, 0.5, "plain", "$HOME", []])
def test_other_values_pass(value):
    assert interpolate(value, PLACE, {}) == Entry(value, PLACE, Rank.FILE)


def test_unset_variable_names_itself_and_the_place():
    with pytest.raises(ConfigError) as error:
        interpolate("${DATA_DIR}/x", PLACE, {})
    assert str(error.value) == (
        "a.yaml:3: ${DATA_DIR}: variable DATA_DIR is not set; set it or write ${DATA_DIR:default}"
    )


@pytest.mark.parametrize("text", ["${}", "${1X}", "${X", "${A-b}", "ok ${X:1} but ${"])
def test_malformed_variable_is_refused(text):
    with pytest.raises(ConfigError, match=r"^a\.yaml:3: malformed variable in "):
        interpolate(text, PLACE, {"X": "1"})
