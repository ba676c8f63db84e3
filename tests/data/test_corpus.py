"""Corpora: named documents from each kind of source, and bad input told with its place."""

import json
import sys
from pathlib import Path

import pytest

from undertow.config.errors import InputError
from undertow.data import corpus as module
from undertow.data.corpus import Document, load_corpus, read_documents
from undertow.data.records import Reading

TEXTS = [Document("row 1", "ebb"), Document("row 2", "fl\u00f6w"), Document("row 3", "tide")]


def write_parquet(path: Path, **columns: list) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path, row_group_size=2)


def test_the_plays_are_named_scenes_of_plain_text():
    plays = load_corpus("plays")
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


def test_text_files_divide_at_form_feeds(tmp_path: Path):
    path = tmp_path / "sea.txt"
    path.write_bytes("\ufefftide\r\n".encode())
    assert load_corpus(path) == [Document("sea.txt", "tide\r\n")]
    path.write_text("ebb\n\f\n\ffl\u00f6w\n", encoding="utf-8")
    assert load_corpus(str(path)) == [Document("sea.txt, part 1", "ebb\n"), Document("sea.txt, part 2", "flöw\n")]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_text_read_in_pieces_is_the_same(tmp_path: Path, monkeypatch, size: int):
    path = tmp_path / "sea.txt"
    path.write_text("\ufeffébb\f🌊🌊\f\f \fend", encoding="utf-8")
    whole = load_corpus(path)
    assert [document.text for document in whole] == ["ébb", "🌊🌊", "end"]
    monkeypatch.setattr(module, "_PIECE", size)
    assert load_corpus(path) == whole
    path.write_bytes("🌊🌊".encode() + b"\xff")
    with pytest.raises(InputError, match="byte 8 is 0xff"):
        load_corpus(path)
    path.write_bytes("🌊🌊".encode()[:-1])
    with pytest.raises(InputError, match="byte 4 is 0xf0"):
        load_corpus(path)


def test_json_lines_keep_names_and_odd_line_breaks(tmp_path: Path):
    path = tmp_path / "sea.jsonl"
    rows = [{"text": "a\u2028b"}, {"text": "c", "name": "third", "other": 1}]
    path.write_text("\ufeff" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    assert load_corpus(path) == [Document("line 1", "a\u2028b"), Document("third", "c")]
    path.write_text('{"body": "d"}\n{"body": ""}\n{"body": "e", "text": 3}')
    assert load_corpus(path, text_field="body") == [Document("line 1", "d"), Document("line 3", "e")]


def test_parquet_rows(tmp_path: Path):
    path = tmp_path / "sea.parquet"
    write_parquet(path, other=[1, 2, 3], text=[document.text for document in TEXTS])
    assert load_corpus(path) == TEXTS
    write_parquet(path, name=["a", None], body=["b", "c"])
    assert load_corpus(path, text_field="body") == [Document("a", "b"), Document("row 2", "c")]
    write_parquet(path, name=["a", "b"])
    assert load_corpus(path, text_field="name") == [Document("a", "a"), Document("b", "b")]


def test_a_directory_is_read_file_by_file_in_order_of_names(tmp_path: Path):
    (tmp_path / "b.jsonl").write_text('{"text": "second"}\n')
    (tmp_path / "a.txt").write_text("first")
    write_parquet(tmp_path / "c.parquet", text=["third"])
    (tmp_path / "README.md").write_text("about")
    assert [document.text for document in load_corpus(tmp_path)] == ["first", "second", "third"]
    (tmp_path / "d.jsonl.gz").write_bytes(b"")
    with pytest.raises(InputError, match=r"'d.jsonl.gz' is no .txt, .jsonl or .parquet file; take it out"):
        load_corpus(tmp_path)


def test_hugging_face_data_on_disk(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": [document.text for document in TEXTS], "other": [1, 2, 3]})
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "two")
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("one", "two", "three"):
        assert load_corpus(f"hf:{tmp_path / name}") == TEXTS
    assert load_corpus(f"hf:{tmp_path / 'two'}", split="test") == [Document("row 1", "flöw")]
    for corpus, split, field, message in (
        ("two", "dev", "text", "split 'dev' cannot be read by datasets"),
        ("three", "dev", "text", "split 'dev' cannot be read by datasets"),
        ("one", "train", "body", r"there is no field 'body'; it has 'text', 'other'; name"),
        ("none", "train", "text", "split 'train' cannot be read by datasets"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            load_corpus(f"hf:{tmp_path / corpus}", field, split)
        assert "\n" not in str(caught.value)


def test_documents_come_one_at_a_time_and_reading_follows(tmp_path: Path):
    path, reading = tmp_path / "sea.jsonl", Reading()
    path.write_text('{"text": "a"}\n{"text": "b"}\nnot JSON')
    documents = read_documents(path, reading=reading)
    assert next(documents).text == "a" and (reading.done, reading.total) == (14, 36)
    assert next(documents).text == "b" and reading.done == 28
    with pytest.raises(InputError, match="line 3: not JSON"):
        next(documents)


@pytest.mark.parametrize(("name", "missing"), [("a.parquet", "pyarrow"), ("hf:sea", "datasets")])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch, name: str, missing: str):
    write_parquet(tmp_path / "a.parquet", text=["a"])
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=rf'needs {missing}; pip install "undertow\[data\]"'):
        load_corpus(name if name.startswith("hf:") else tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", None, "there is no such file"),
        ("a.md", b"x", r"neither shipped \(plays\), nor a .txt, .jsonl or .parquet file, nor an existing directory"),
        ("a", None, "nor an existing directory of such files or of prepared shards, nor hf:NAME"),
        ("a.txt", b" \n", "is empty"),
        ("a.jsonl", b"\n", "is empty"),
        ("a.txt", b"sea\xffside", "not UTF-8: byte 3 is 0xff"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "line 2: not UTF-8: byte 10 of the line is 0xff"),
        ("a.jsonl", b'{"text": "a"}\n{"text": }', "line 2: not JSON at column 10"),
        ("a.jsonl", b"[" * 100_000, "line 1: JSON that cannot be read"),
        ("a.jsonl", b'{"text": ' + b"1" * 5000 + b"}", "line 1: JSON that cannot be read"),
        ("a.jsonl", b'{"text": "a"}\n["b"]', 'line 2: expected an object with a string "text"'),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"a\\n": 1, "b": 2}',
            r"line 2: there is no field 'text'; it has 'a\\n', 'b'; name the",
        ),
        (
            "a.jsonl",
            b"{}",
            "line 1: there is no field 'text'; it has none; name the one .* with data.text_field, or --te",
        ),
        ("a.jsonl", b'{"text": ["a"]}', "line 1: the field 'text' must be a string, it is a list"),
        ("a.jsonl", b'{"text": ""}', "is empty: it needs at least one document with text"),
        ("a.jsonl", b'{"text": "a", "name": 3}', 'line 1: "name" must be a string, not 3'),
        ("a.jsonl", rb'{"text": "\ud83d"}', "line 1: the text holds half a surrogate pair"),
        ("a.parquet", b"PAR1 no", "a.parquet', after row 0: not readable as Parquet"),
    ],
)
def test_a_bad_corpus_is_named_with_its_place(tmp_path: Path, name: str, content: bytes | None, message: str):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_corpus(tmp_path / name)


def test_bad_parquet_is_named_with_its_row(tmp_path: Path):
    path = tmp_path / "a.parquet"
    for columns, message in (
        ({"text": [1]}, "row 1: the field 'text' must be a string, it is a int"),
        ({"text": ["a", None]}, "row 2: the field 'text' must be a string, it is null"),
        ({"text": [b"a"]}, "row 1: the field 'text' must be a string, it is a bytes"),
        ({"body": ["a"], "n": [1]}, r"there is no field 'text'; it has 'body', 'n'; name the one"),
        ({"text": []}, "is empty"),
    ):
        write_parquet(path, **columns)
        with pytest.raises(InputError, match=message):
            load_corpus(path)


@pytest.mark.parametrize("kind", ["timestamp", "date64", "duration"])
def test_parquet_of_values_beyond_those_of_python_is_refused(tmp_path: Path, kind: str):
    pyarrow = pytest.importorskip("pyarrow")
    column = pyarrow.array([2**50], pyarrow.date64() if kind == "date64" else getattr(pyarrow, kind)("s"))
    for columns in ({"text": ["a"], "name": column}, {"text": column}):
        write_parquet(tmp_path / "a.parquet", **columns)
        with pytest.raises(InputError, match=r"a.parquet', after row 0: not readable as Parquet") as caught:
            load_corpus(tmp_path / "a.parquet")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["", ".txt", ".parquet"])
def test_a_name_that_no_file_can_have_is_refused(suffix: str):
    with pytest.raises(InputError, match=r"neither shipped|there is no such file"):
        load_corpus("x" * 300 + suffix)


def test_directories_without_data_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"the directory holds no .txt, .jsonl or .parquet file"):
        load_corpus(tmp_path)
    (tmp_path / "inner").mkdir()
    with pytest.raises(InputError, match=r"'inner' is no .txt"):
        load_corpus(tmp_path)
