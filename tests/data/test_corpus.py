import json
from pathlib import Path

import pytest

from undertow.config.errors import InputError
from undertow.data.corpus import Document, load_corpus, split


@pytest.fixture(scope="module")
def plays() -> list[Document]:
    return load_corpus("plays")


def test_the_plays_are_named_scenes_of_plain_text(plays: list[Document]):
    scenes = {scene.name: scene.text for scene in plays}
    assert len(scenes) == len(plays) == 781
    assert sum(len(text.encode()) for text in scenes.values()) == 5_014_223
    assert scenes["Hamlet, ACT I, SCENE I"].startswith(
        "Hamlet, ACT I, SCENE I. Elsinore. A platform before the castle.\n\n"
        "[FRANCISCO at his post. Enter to him BERNARDO]\n\nBERNARDO:\nWho's there?\n\nFRANCISCO:\nNay, answer me:"
    )
    text = "".join(scenes.values())
    assert not set("*_\\#\t\r\f\x00") & set(text)
    assert text.count("[") == text.count("]")


def test_the_default_split_of_the_plays_holds_out_two_percent_in_whole_scenes(plays: list[Document]):
    training, validation = split(plays)
    assert (len(training), len(validation)) == (763, 18)
    assert sum(len(document.text.encode()) for document in validation) == 102_085
    assert sorted(document.name for document in training + validation) == sorted(document.name for document in plays)
    assert (training, validation) == split(plays)
    assert split(plays, seed=1)[1] != validation


def test_no_part_of_a_split_is_ever_empty():
    pair = [Document("a", "x" * 1000), Document("b", "y")]
    for fraction in (1e-9, 0.5, 0.999):
        for seed in range(4):
            training, validation = split(pair, fraction, seed)
            assert {document.name for document in training + validation} == {"a", "b"}
            assert len(training) == len(validation) == 1


def test_one_document_is_cut_at_a_line_break():
    training, validation = split([Document("a", "one\ntwo\nthree\nfour\n")], 0.25)
    assert training == [Document("a (start)", "one\ntwo\nthree\n")]
    assert validation == [Document("a (end)", "four\n")]
    training, validation = split([Document("a", "abcdefgh")], 0.25)
    assert (training[0].text, validation[0].text) == ("abcdef", "gh")


@pytest.mark.parametrize("fraction", [0, 1, -0.5, float("nan")])
def test_a_fraction_outside_zero_to_one_is_refused(fraction: float):
    with pytest.raises(InputError, match="must lie between 0 and 1"):
        split([Document("a", "text"), Document("b", "text")], fraction)


def test_nothing_to_divide_is_refused():
    with pytest.raises(InputError, match="no documents"):
        split([])
    with pytest.raises(InputError, match="'a' of one character"):
        split([Document("a", "x")])


def test_text_files_divide_at_form_feeds(tmp_path: Path):
    path = tmp_path / "sea.txt"
    path.write_bytes("\ufefftide\r\n".encode())
    assert load_corpus(path) == [Document("sea.txt", "tide\r\n")]
    path.write_text("ebb\n\f\n\ffl\u00f6w\n", encoding="utf-8")
    assert load_corpus(str(path)) == [Document("sea.txt, part 1", "ebb\n"), Document("sea.txt, part 2", "flöw\n")]


def test_json_lines_keep_names_and_odd_line_breaks(tmp_path: Path):
    path = tmp_path / "sea.jsonl"
    rows = [{"text": "a\u2028b"}, {"text": "c", "name": "third", "other": 1}]
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    assert load_corpus(path) == [Document("line 1", "a\u2028b"), Document("third", "c")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", None, "there is no such file"),
        ("a.md", b"x", r"neither shipped \(plays\) nor a path ending in .txt or .jsonl"),
        ("a.txt", b" \n", "is empty"),
        ("a.jsonl", b"\n", "is empty"),
        ("a.txt", b"sea\xffside", "not UTF-8: byte 3 is 0xff"),
        ("a.jsonl", b'{"text": "a"}\n{"text": }', "line 2: not JSON at column 10"),
        ("a.jsonl", b'{"text": "a"}\n["b"]', 'line 2: expected an object with a non-empty string "text"'),
        ("a.jsonl", b'{"text": ""}', 'line 1: expected an object with a non-empty string "text"'),
        ("a.jsonl", b'{"text": "a", "name": 3}', 'line 1: "name" must be a string, not 3'),
        ("a.jsonl", rb'{"text": "\ud83d"}', "line 1: the text holds half a surrogate pair"),
    ],
)
def test_a_bad_corpus_is_named_with_its_place(tmp_path: Path, name: str, content: bytes | None, message: str):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_corpus(tmp_path / name)
