"""The data of a run belongs to its model, from whatever source."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.data.chatty import ANSWER_ID, chat_tokenizer
from tests.engine.bytelevel import tokenizer
from undertow.config.errors import ConfigError, InputError
from undertow.config.model import ModelConfig
from undertow.config.resolve import resolve
from undertow.config.training import DataConfig
from undertow.data.packing import IGNORED, Packer
from undertow.data.prepare import prepare
from undertow.data.tokenizer import Tokenizer
from undertow.train.text import read_text, tokenizer_for

TINY = ModelConfig.from_preset("v4-tiny")
WIDE = ModelConfig.from_preset("v4-tiny", vocab_size=4096)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "corpus.txt"
    path.write_text("\f".join(f"scene {i}: " + "words, words " * 9 for i in range(12)), "utf-8")
    return str(path)


@pytest.fixture
def shards(corpus: str, tmp_path: Path) -> str:
    prepare(corpus, tmp_path / "shards", Tokenizer.from_name("bpe-2048"), validation_fraction=0.2, shard_tokens=99)
    return str(tmp_path / "shards")


@pytest.mark.parametrize(("vocabulary", "entries"), [(2048, 2048), (4095, 2048), (4096, 4096), (129280, 4096)])
def test_small_bpe_is_the_largest_that_fits(vocabulary, entries):
    model = ModelConfig.from_preset("v4-tiny", vocab_size=vocabulary)
    assert tokenizer_for("small-bpe", model).vocab_size == entries


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("small-bpe", {"vocab_size": 300}, "vocab_size 300 is below that of every shipped tokenizer"),
        ("bpe-4096", {}, "its 4096 entries exceed the vocab_size 2048"),
        ("bpe-2048", {"eos_token_id": 7}, "begin and end tokens are 0 and 1, .* are 0 and 7"),
        ("bpe-204", {}, "'bpe-204' is neither shipped .* nor a directory with a tokenizer.json, nor such a file"),
    ],
)
def test_a_tokenizer_that_is_not_the_models_is_refused(name, changes, message):
    with pytest.raises(InputError, match=message):
        tokenizer_for(name, TINY.model_copy(update=changes))


def test_a_tokenizer_is_a_directory_or_a_file(tmp_path: Path):
    tokenizer().save(tmp_path)
    found = [tokenizer_for(str(path), TINY) for path in (tmp_path, tmp_path / "tokenizer.json")]
    assert {each.identity for each in found} == {tokenizer().identity}
    with pytest.raises(InputError, match=r"holds no tokenizer.json"):
        (tmp_path / "empty").mkdir()
        tokenizer_for(str(tmp_path / "empty"), TINY)


def test_held_out_text_is_the_same_each_time_and_none_of_it_is_trained_on(corpus: str):
    data = DataConfig(corpus=corpus, validation_fraction=0.2)
    text = read_text(data, TINY, keep_text=True)
    assert {d.name for d in text.training} & {d.name for d in text.validation} == set()
    assert len(text.training_ids) == len(text.training) == 12 - len(text.validation)
    every = list(text.held_out(2, 16))
    assert sum(batch.ids.size for batch in every) == sum(map(len, text.validation_ids))
    assert [b.ids.tolist() for b in text.held_out(2, 16, 4)] == [b.ids.tolist() for b in every[:2]]
    rows = [row for batch in every for row in batch.labels.tolist()]
    for height, sequences in ((2, 1), (2, 3), (3, 4), (9, 2), (2, len(rows)), (2, len(rows) + 7)):
        found = list(text.held_out(height, 16, sequences))
        assert [row for batch in found for row in batch.labels.tolist()] == rows[:sequences]
        assert all(b.ids.shape == b.labels.shape == b.segment_ids.shape and 0 < len(b.ids) <= height for b in found)
    again = read_text(data, TINY)
    assert (again.training, again.validation) == ([], [])
    for mine, theirs in ((again.training_ids, text.training), (again.validation_ids, text.validation)):
        assert [again.tokenizer.decode(ids) for ids in mine] == [document.text for document in theirs]


def test_shards_are_the_same_data_without_the_text(corpus: str, shards: str):
    text, held = (
        read_text(DataConfig(corpus=each, validation_fraction=0.2), TINY, keep_text=True) for each in (corpus, shards)
    )
    assert (held.training, held.validation) == ([], [])
    for mine, theirs in ((held.training_ids, text.training_ids), (held.validation_ids, text.validation_ids)):
        assert [ids.tolist() for ids in mine] == [ids.tolist() for ids in theirs]
    batches = [list(each.held_out(2, 16, 6)) for each in (text, held)]
    assert all(np.array_equal(a.labels, b.labels) for a, b in zip(*batches, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation_fraction": 0.1}, "data.validation_fraction 0.1: the shards of .* were divided with 0.2"),
        ({"kind": "chat"}, "data.kind chat: the shards of .* are of kind text"),
        (
            {"tokenizer": "bpe-4096"},
            "bpe-4096: is not the tokenizer of the shards in .*; set data.tokenizer=small-bpe, which is theirs here",
        ),
    ],
)
def test_shards_of_another_kind_division_or_tokenizer_are_refused(shards: str, changes: dict, message: str):
    model = TINY.model_copy(update={"vocab_size": 4096})
    data = DataConfig(**{"corpus": shards, "validation_fraction": 0.2, "tokenizer": "bpe-2048", **changes})
    with pytest.raises(InputError, match=message):
        read_text(data, model)


@pytest.mark.parametrize("vocabulary", [2048, 4096])
def test_shards_bring_their_tokenizer(shards: str, vocabulary: int):
    model = TINY.model_copy(update={"vocab_size": vocabulary})
    for name in ("small-bpe", "bpe-2048", f"{shards}/tokenizer"):
        text = read_text(DataConfig(corpus=shards, validation_fraction=0.2, tokenizer=name), model)
        assert text.tokenizer.vocab_size == 2048 and len(text.training_ids) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"vocab_size": 2047},
            "the 2048 entries of its .* vocab_size 2047; prepare it again with --tokenizer and a smal",
        ),
        ({"eos_token_id": 7}, "data.corpus .*shards: begin and end tokens are 0 and 1, .* are 0 and 7"),
    ],
)
def test_shards_whose_tokenizer_does_not_fit_the_model_are_refused(shards: str, changes: dict, message: str):
    with pytest.raises(InputError, match=message):
        read_text(DataConfig(corpus=shards, validation_fraction=0.2), TINY.model_copy(update=changes))


def test_the_mend_for_shards_of_a_larger_vocabulary(corpus: str, tmp_path: Path):
    prepare(corpus, tmp_path / "wide", Tokenizer.from_name("bpe-4096"))
    with pytest.raises(
        InputError, match=r"4096 entries .* vocab_size 2048; prepare it again with --tokenizer bpe-2048$"
    ):
        read_text(DataConfig(corpus=str(tmp_path / "wide")), TINY)


def test_a_changed_tokenizer_of_shards_is_refused(shards: str):
    Tokenizer.from_name("bpe-4096").save(Path(shards) / "tokenizer")
    with pytest.raises(InputError, match="tokenizer: is not the tokenizer of these shards; prepare them again"):
        read_text(DataConfig(corpus=shards, validation_fraction=0.2), WIDE)


def test_a_model_that_is_tuned_keeps_its_tokenizer(corpus: str, shards: str, tmp_path: Path):
    """The model has room for bpe-4096, but learned with bpe-2048."""
    Tokenizer.from_name("bpe-2048").save(tmp_path / "model")
    model = str(tmp_path / "model")
    for source in (corpus, shards):
        for name in ("small-bpe", "bpe-2048", model):
            data = DataConfig(corpus=source, validation_fraction=0.2, tokenizer=name)
            assert read_text(data, WIDE, model).tokenizer.vocab_size == 2048
    with pytest.raises(
        InputError, match=r"data.tokenizer bpe-4096: is not .* in .*model; set data.tokenizer=small-bpe"
    ):
        read_text(DataConfig(corpus=corpus, tokenizer="bpe-4096"), WIDE, model)
    Tokenizer.from_name("bpe-4096").save(model)
    with pytest.raises(
        InputError, match=r"another tokenizer than the model in .*model; prepare .* --tokenizer .*model"
    ):
        read_text(DataConfig(corpus=shards, validation_fraction=0.2), WIDE, model)
    (tmp_path / "model" / "tokenizer.json").unlink()
    assert tokenizer_for("bpe-2048", WIDE, model).vocab_size == 2048
    assert tokenizer_for("small-bpe", WIDE, model).vocab_size == 4096
    assert tokenizer_for("small-bpe", WIDE, "x" * 300).vocab_size == 4096


def test_conversations_teach_answers_alone(tmp_path: Path):
    chat_tokenizer().save(tmp_path)
    rows = [{"prompt": f"question {number}", "response": f"answer {number}"} for number in range(8)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(
        corpus=str(tmp_path / "chat.jsonl"), kind="chat", tokenizer=str(tmp_path), validation_fraction=0.3
    )
    text = read_text(data, TINY)
    assert (text.training, len(text.training_ids) + len(text.validation_ids)) == ([], 8)
    batch = Packer(text.training_ids, 1, text.training_ids.tokens).take(1, text.training_ids.tokens)
    segments = batch.segment_ids[0]
    for number in range(segments[-1] + 1):
        ids, labels = (each[0][segments == number].tolist() for each in (batch.ids, batch.labels))
        opening = ids.index(ANSWER_ID)
        assert labels == [IGNORED] * opening + ids[opening + 1 :] + [IGNORED]
    prepare(str(tmp_path / "chat.jsonl"), tmp_path / "out", chat_tokenizer(), kind="chat", validation_fraction=0.3)
    again = read_text(data.model_copy(update={"corpus": str(tmp_path / "out")}), TINY)
    assert [ids.tolist() for ids in again.training_ids] == [ids.tolist() for ids in text.training_ids]


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("text", "", "is empty"),
        ("text", "x", "of one character cannot be divided"),
        ("chat", '{"prompt": "a", "response": "b"}', "one document cannot be divided"),
    ],
)
def test_the_least_corpus(tmp_path: Path, kind: str, content: str, message: str):
    path = tmp_path / ("a.jsonl" if kind == "chat" else "a.txt")
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        read_text(DataConfig(corpus=str(path), kind=kind), TINY)
    path.write_text(content + "\n" + content if kind == "chat" else "xy")
    text = read_text(DataConfig(corpus=str(path), kind=kind), TINY)
    assert len(text.training_ids) == len(text.validation_ids) == 1
    assert (Packer(text.training_ids, 1, 32).take(1, 32).labels != IGNORED).any()


@pytest.mark.parametrize(
    ("words", "unread"),
    [
        (["data.split=test"], "data.split"),
        (["data.text_field=body"], "data.text_field"),
        (["data.kind=text", "data.validation_fraction=0.2"], None),
    ],
)
def test_keys_that_say_nothing_about_the_source_are_not_read(corpus: str, shards: str, words: list[str], unread: str):
    for source in (corpus, shards):
        resolved = resolve(
            None, ["model=v4-tiny", f'data.corpus="{source}"', "data.validation_fraction=0.2", *words], {}
        )
        config = resolved.tracked
        read_text(config.data, config.model)
        if unread:
            with pytest.raises(ConfigError, match=rf"nothing in this run reads {unread} "):
                resolved.refuse_unread()
        else:
            resolved.refuse_unread()
