"""Text to typed values and back."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@given(st.text())
def test_shown_text_is_read_back_as_that_text(text):
    assert typed(shown(text)) == text


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)))
def test_shown_scalar_is_read_back_with_its_type(value):
    result = typed(shown(value))
    assert (result, type(result)) == (value, type(value))
    assert not isinstance(value, float) or math.copysign(1, result) == math.copysign(1, value)


@given(st.text())
def test_shown_is_one_line(text):
    assert len(shown(text).splitlines()) == 1


def test_told_quotes_text_and_names_mappings():
    assert [told(v) for v in ("many", 3, None, [1], {"a": 1})] == ["'many'", "3", "null", "[1]", "a mapping of keys"]
