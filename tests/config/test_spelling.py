"""Names from files in messages: nothing of them steers a terminal, and none is long."""

import pytest

from undertow.config.errors import InputError, UndertowError
from undertow.config.spelling import printable, shortened, some


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ｜DSML｜ é🙂", "plain ｜DSML｜ é🙂"),
        ("a\nb\x1b[31mc\0", "a\\u000ab\\u001b[31mc\\u0000"),
        ("\udcff\u2028\U000e0001", "\\udcff\\u2028\\U000e0001"),
    ],
)
def test_what_steers_a_terminal_is_escaped(text: str, shown: str):
    assert printable(text) == shown


def test_lists_and_names_end():
    assert shortened("x" * 60) == "x" * 60 and shortened("x" * 61) == "x" * 60 + "..."
    assert some(["a", "b\n", "c"]) == "a, b\\u000a, c" and some(["a", "b", "c", "d"]) == "a, b, c, ..."
    assert some(["x" * 10**5], longest=5) == "xxxxx..." and some([]) == ""


@pytest.mark.parametrize("kind", [UndertowError, InputError])
def test_errors_are_told_in_one_line_that_is_safe_to_print(kind: type[UndertowError]):
    assert str(kind("mtp.\x1b[31m:\nsurplus")) == "mtp.\\u001b[31m: surplus"
