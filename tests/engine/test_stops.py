import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.engine.stops import StopStrings


def cut(text: str, stops: list[str]) -> str:
    """On the whole text: the first character that completes a stop decides; the longest ending there is cut."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    stop = StopStrings(stops)
    passed = []
    for piece in pieces:
        passed.append(stop.push(piece))
        if stop.found:
            return passed, True
    return [*passed, stop.flush()], False


def test_a_beginning_is_held_until_it_is_refuted():
    stop = StopStrings(["\n\nUser:"])
    assert [stop.push(p) for p in ("Hi\n", "\nUs", "e", "d", "\n")] == ["Hi", "", "", "\n\nUsed", ""]
    assert not stop.found
    assert stop.flush() == "\n"


def test_a_stop_across_three_pieces():
    assert run(["He said", " st", "o", "p now"], [" stop"]) == (["He said", "", "", ""], True)


@pytest.mark.parametrize(
    ("text", "stops", "left"),
    [
        ("abcdef", ["def", "bc"], "a"),  # order in the text, not in the list
        ("abcdef", ["bcd", "c"], "ab"),  # completed first
        ("abcdef", ["c", "abc"], ""),  # completed together: the longest
        ("aaab", ["aab"], "a"),  # overlap with itself
        ("xabab", ["ababc"], "xabab"),  # never completed
    ],
)
def test_which_stop_wins(text: str, stops: list[str], left: str):
    for pieces in ([text], list(text)):
        assert "".join(run(pieces, stops)[0]) == left


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_any_cut_of_the_text_gives_the_reference(pieces: list[str], stops: list[str]):
    text = "".join(pieces)
    passed, found = run(pieces, stops)
    assert "".join(passed) == cut(text, stops)
    assert found == any(stop in text for stop in stops)
