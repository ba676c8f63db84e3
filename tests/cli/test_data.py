"""`undertow data prepare`: shards that a run trains on, help, progress and mistakes in one line."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engine.bytelevel import VOCABULARY, tokenizer
from undertow.cli import data, main
from undertow.config.overrides import command_line


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    rows = [json.dumps({"text": f"to be or not to be, that is question {number}"}) for number in range(20)]
    path.write_text("\n".join(rows))
    tokenizer().save(tmp_path / "words")
    return path


def prepared(corpus: Path, *words: str) -> list[str]:
    return [
        *("data", "prepare", str(corpus), str(corpus.with_name("out"))),
        "--tokenizer",
        str(corpus.with_name("words")),
        *words,
    ]


def test_prepare_then_train(corpus: Path, tmp_path: Path, capsys):
    assert main(prepared(corpus, "--validation-fraction", "0.2", "--shard-tokens", "300")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("training: 15 documents, ") and lines[1].startswith("held out: 5 documents, ")
    assert lines[2] == f"3 shard(s) of uint16 in {tmp_path / 'out'}"
    words = f"data.corpus={tmp_path / 'out'} data.kind=text data.validation_fraction=0.2"
    assert lines[3:] == [f"train on them: undertow train RECIPE {words}"]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{preset: v4-debug, vocab_size: {VOCABULARY}, num_hidden_layers: 3, compress_ratios: [0, 4, 8, 0]}}\n"
        "train: {steps: 1, batch_size: 1, sequence_length: 40, eval_sequences: 1}\n"
        f"tracking: []\ndevice: cpu\nout: {tmp_path / 'run'}\n"
    )
    assert main(["train", str(recipe), *words.split()]) == 0
    assert "done: step 1, 40 tokens" in capsys.readouterr().out


def test_lines_where_there_is_no_terminal(corpus: Path, capsys, monkeypatch):
    monkeypatch.setattr(data, "EVERY", 0.0)
    assert main(prepared(corpus)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20 + 4
    assert lines[0].startswith("1 documents, 40 tokens, ") and ", 100%, 0 s left" in lines[19]


def test_a_bar_on_a_terminal(corpus: Path):
    import pty

    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "undertow", *prepared(corpus)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(command, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    shown = b""
    try:
        while piece := os.read(leader, 4096):
            shown += piece
    except OSError:  # the other end is closed
        pass
    assert process.wait(timeout=60) == 0
    assert b"20 documents" in shown and b"left" in shown and "━".encode() in shown
    assert b"training: 18 documents" in shown


def test_help_names_every_option_with_its_default(capsys):
    assert main(["data", "prepare", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "[default: bpe-2048]",
        "[default: text]",
        "[default: train]",
        "[default: 0.05]",
        "[default: 100000000]",
    ):
        assert part in text, part
    for option in ("--tokenizer", "--kind", "--text-field", "--split", "--validation-fraction", "--shard-tokens"):
        assert option in text, option


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokenizer", "none"], "tokenizer 'none' is neither shipped"),
        (["--kind", "poem"], "'poem' is not one of"),
        (["--kind", "chat"], "corpus.jsonl', line 1: expected an object with 'prompt' and 'response'"),
        (["--text-field", "body"], "line 1: there is no field 'body'; it has 'text'; name the one that holds the text"),
        (["--validation-fraction", "0"], "validation_fraction 0.0 must lie between 0 and 1"),
        (["--shard-tokens", "0"], "shard_tokens 0 must be at least 1"),
    ],
)
def test_mistakes_are_one_line(corpus: Path, capsys, words: list[str], message: str):
    assert main(prepared(corpus, *words)) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert not corpus.with_name("out").exists()


def test_an_empty_name_and_an_existing_one_are_refused(corpus: Path, tmp_path: Path, capsys):
    assert main(["data", "prepare", str(corpus), ""]) == 2
    assert "DST is empty" in capsys.readouterr().err
    assert main(["data", "prepare", str(corpus), str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    for source, target in ((str(corpus), "x" * 300), (str(corpus), str(tmp_path / "nx" / "..")), ("x" * 300, "out")):
        assert main(["data", "prepare", source, target]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "words"]
    assert main(["data"]) == 2
    assert capsys.readouterr().err == "error: Missing command (see 'undertow data --help')\n"


def test_interruption_leaves_nothing(corpus: Path, tmp_path: Path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "_told", interrupted)
    monkeypatch.setattr(data, "EVERY", 0.0)
    assert main(prepared(corpus)) == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "words"]


def test_a_request_to_end_leaves_nothing(corpus: Path, tmp_path: Path):
    corpus.write_text("".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(20_000)))
    process = subprocess.Popen([sys.executable, "-m", "undertow", *prepared(corpus, "--shard-tokens", "1")])
    writing = tmp_path / ".out.writing" / "shard-00003.tokens"
    while process.poll() is None and not writing.exists():
        time.sleep(0.01)
    process.terminate()
    assert process.wait(timeout=60) == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "words"]


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("shards", "data.corpus=shards"),
        ("7", "'data.corpus=\"7\"'"),
        ("a b", "'data.corpus=a b'"),
        ("~", "'data.corpus=\"~\"'"),
    ],
)
def test_the_word_that_names_the_shards_is_read_back(name: str, word: str):
    told = data._word("data.corpus", name)
    assert told == word
    assert command_line(shlex.split(told))["data.corpus"].value == name
