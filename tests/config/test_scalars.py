"""Text to typed values and back."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.config.errors import ConfigError
from undertow.config.scalars import shown, told, typed

TABLE = [
    ("null", None),
    ("~", None),
    ("true", True),
    ("False", False),
    ("0", 0),
    ("-12", -12),
    ("3e-4", 3e-4),
    ("1e-06", 1e-6),
    (".5", 0.5),
    ("2.", 2.0),
    ("[1, 2]", [1, 2]),
    ("[a, 2.5, null, true, [3]]", ["a", 2.5, None, True, [3]]),
    ("[]", []),
    ('"12"', "12"),
    ("'null'", "null"),
    (" 7 ", 7),
    ("", ""),
    ("on", "on"),
    ("off", "off"),
    ("yes", "yes"),
    ("plays", "plays"),
    ("two words", "two words"),
    ("a: b", "a: b"),
    ("{a: 1}", "{a: 1}"),
    ("- a", "- a"),
    ("# note", "# note"),
    ("5 # note", "5 # note"),
    ("2024-01-01", "2024-01-01"),
    ("12:30", "12:30"),
    ("!!int 5", "!!int 5"),
    ("[1, 2", "[1, 2"),
    ("/data/*.txt", "/data/*.txt"),
]


@pytest.mark.parametrize(("text", "value"), TABLE)
def test_typed_table(text, value):
    result = typed(text)
    assert (result, type(result)) == (value, type(value))


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_shown_text_is_read_back_as_that_text(text):
    assert typed(shown(text)) == text


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)))
def test_shown_scalar_is_read_back_with_its_type(value):
    result = typed(shown(value))
    assert (result, type(result)) == (value, type(value))
    assert not isinstance(value, float) or math.copysign(1, result) == math.copysign(1, value)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_shown_is_one_line(text):
    assert len(shown(text).splitlines()) == 1


def test_told_quotes_text_and_names_mappings():
    assert [told(v) for v in ("many", 3, None, [1], {"a": 1})] == ["'many'", "3", "null", "[1]", "a mapping of keys"]


@pytest.mark.parametrize("text", ["0x_", "0b_", "0o_", "2001-99-99", "1" * 5000])
def test_what_only_looks_like_a_number_or_date_is_text(text):
    assert typed(text) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[2001-99-99]", "k: '[2001-99-99]' holds a value that cannot be read; quote what is text"),
        ("[0x_]", "k: '[0x_]' holds a value that cannot be read; quote what is text"),
        ("[2020-01-01]", "k: a date is not allowed here; quote it if text was meant"),
        ("[!!binary aGk=]", "k: a bytes is not allowed here; quote it if text was meant"),
        ("[!!set {a}]", "k: a set is not allowed here; quote it if text was meant"),
        ("[{[1]: 2}]", "k: a mapping is not allowed here; quote it if text was meant"),
        ("[&x [*x]]", "k: a list is used twice by an alias; write it out"),
        ("[" * 20 + "]" * 20, "k: lists are nested too deeply; allowed: 16 levels"),
        ("[" * 3000, f"k: '{'[' * 199}... (3002 characters) is nested too deeply"),
        ("a\0", "k: text holds the character \\u0000, which UTF-8 files and paths cannot"),
        ("\udcff", "k: text holds the character \\udcff, which UTF-8 files and paths cannot"),
        ('"\\ud800"', "k: text holds the character \\ud800, which UTF-8 files and paths cannot"),
    ],
)
def test_what_no_key_takes_is_refused(text, message):
    with pytest.raises(ConfigError) as error:
        typed(text, "k")
    assert str(error.value) == message


def test_long_values_are_cut_in_messages():
    assert told("x" * 300) == f"'{'x' * 199}... (302 characters)"
