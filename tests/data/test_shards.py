"""Prepared shards: what comes out is what went in, the directory is whole or absent, and no change goes unseen."""

import json
import os
import resource
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.chatty import chat_tokenizer
from tests.engine.bytelevel import VOCABULARY, tokenizer
from undertow.config.errors import InputError, UndertowError
from undertow.data.chat import encode_conversations, read_conversations
from undertow.data.corpus import Document, load_corpus
from undertow.data.division import split
from undertow.data.encoding import encode_documents
from undertow.data.manifest import FileFacts, Manifest, file_digest
from undertow.data.mapped import OPEN, MappedNumbers, mapping
from undertow.data.packing import Packer
from undertow.data.prepare import Preparation, prepare
from undertow.data.prepared import is_prepared, open_shards
from undertow.data.records import Reading
from undertow.data.shards import new_directory
from undertow.data.store import Part, TokenStore

TEXTS = [f"scene {number}: " + "words " * number for number in range(12)]


def stored(documents: list[Document]) -> TokenStore:
    return TokenStore.of(example.ids for example in encode_documents(documents, tokenizer()))


def opened(target: Path, whole: int = 1 << 30) -> tuple[TokenStore, TokenStore]:
    return open_shards(target, Manifest.read(target), whole)


def as_lists(store: TokenStore) -> list[list[int]]:
    return [document.tolist() for document in store]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "corpus.txt"
    path.write_text("\f".join(TEXTS))
    return str(path)


@pytest.fixture
def prepared(corpus: str, tmp_path: Path) -> Path:
    prepare(corpus, tmp_path / "shards", tokenizer(), validation_fraction=0.2, shard_tokens=150)
    return tmp_path / "shards"


def test_a_directory_of_shards(prepared: Path, corpus: str):
    manifest = Manifest.read(prepared)
    assert (manifest.kind, manifest.corpus, manifest.dtype, manifest.validation_fraction) == (
        "text",
        corpus,
        "uint16",
        0.2,
    )
    assert [shard.documents for shard in manifest.shards] == [6, 3, 3]  # each ends with the document that fills it
    names = [f"shard-0000{number}.{kind}" for number in range(3) for kind in ("offsets", "tokens")]
    assert sorted(path.name for path in prepared.iterdir()) == ["held-out", "manifest.json", *names, "tokenizer"]
    first = np.fromfile(prepared / "shard-00000.offsets", dtype="<i8").tolist()
    assert first == np.cumsum([0, *(len(text) + 2 for text in TEXTS[:6])]).tolist()
    ids = np.fromfile(prepared / "shard-00000.tokens", dtype="<u2")
    assert ids[: first[1]].tolist() == [0, *tokenizer().encode(TEXTS[0]), 1]
    sides = manifest.training, manifest.validation
    assert sum(side.bytes for side in sides) == sum(map(len, TEXTS))
    assert sum(side.tokens for side in sides) == sum(shard.tokens for shard in manifest.shards)
    assert (manifest.tokenizer.identity, manifest.tokenizer.bos_id) == (tokenizer().identity, 0)
    assert type(tokenizer()).load(str(prepared / "tokenizer")).identity == tokenizer().identity
    assert not [path for path in prepared.parent.iterdir() if path.name.startswith(".")]


def test_shards_hold_the_documents_and_the_division_of_the_corpus(prepared: Path, corpus: str):
    parts = split(load_corpus(corpus), 0.2)
    for store, documents in zip(opened(prepared), parts, strict=True):
        assert as_lists(store) == as_lists(stored(documents))
        assert isinstance(store.read(0, 0, 1)[0], np.memmap)
        mapped, held = (Packer(each, 2, 7, seed=3) for each in (store, stored(documents)))
        for _ in range(40):
            assert np.array_equal(next(mapped).labels, next(held).labels)


@settings(deadline=None, max_examples=25)
@given(
    texts=st.lists(st.text("ab é🌊\n", min_size=1, max_size=9).filter(str.strip), min_size=1, max_size=9),
    fraction=st.sampled_from([0.01, 0.3, 0.9]),
    shard_tokens=st.integers(1, 40),
)
def test_any_corpus_survives(texts: list[str], fraction: float, shard_tokens: int, tmp_path_factory):
    if len(texts) == len(texts[0]) == 1:
        return  # cannot be divided
    folder = tmp_path_factory.mktemp("any")
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(
        str(folder / "a.jsonl"), folder / "out", tokenizer(), validation_fraction=fraction, shard_tokens=shard_tokens
    )
    for store, documents in zip(opened(folder / "out"), split(load_corpus(folder / "a.jsonl"), fraction), strict=True):
        assert as_lists(store) == as_lists(stored(documents))


def test_conversations_keep_their_masks(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": f"question {number}", "response": f"answer {number}"} for number in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(str(path), tmp_path / "out", chat_tokenizer(), kind="chat", validation_fraction=0.3, shard_tokens=60)
    examples = list(encode_conversations(read_conversations(str(path)), chat_tokenizer()))
    found = []
    for store in opened(tmp_path / "out"):
        found += [tuple(np.concatenate(store.read(n, 0, 99)).tolist()) for n in range(len(store))]  # type: ignore[arg-type]
        assert len(store) > 0
    wanted = [(*e.ids.tolist(), *e.learned.tolist()) for e in examples if e.learned is not None]
    assert sorted(found) == sorted(wanted) and len(found) == 6
    with pytest.raises(InputError, match="one document cannot be divided"):
        path.write_text(json.dumps(rows[0]))
        prepare(str(path), tmp_path / "one", chat_tokenizer(), kind="chat")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "out"]


def test_wide_vocabularies_take_four_bytes(tmp_path: Path, corpus: str, monkeypatch):
    wide = type(tokenizer())(tokenizer()._definition)
    wide.vocab_size = 129280
    manifest = prepare(corpus, tmp_path / "wide", wide)
    assert manifest.dtype == "uint32" and opened(tmp_path / "wide")[0][0].dtype.str == "<u4"


def test_progress_follows_documents(corpus: str, tmp_path: Path):
    seen = []
    prepare(corpus, tmp_path / "out", tokenizer(), watch=lambda done: seen.append((done.documents, done.tokens)))
    assert [documents for documents, _ in seen] == list(range(1, 13))
    assert seen[-1][1] == sum(len(text) + 2 for text in TEXTS)
    assert Preparation(Reading()).documents == 0


def damage(change: Callable[[bytes], bytes], name: str, prepared: Path) -> None:
    path = prepared / name
    path.write_bytes(change(path.read_bytes()))


def edited(prepared: Path, **changes) -> None:
    path = prepared / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", ["shard-00001.tokens", "shard-00000.offsets", "held-out"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-2], "{name}: has [0-9]+ bytes, [0-9]+ were prepared"),
        (lambda data: data + b"\0\0", "{name}: has [0-9]+ bytes, [0-9]+ were prepared"),
        (lambda data: data[:5] + bytes([data[5] ^ 1]) + data[6:], "{name}: was changed after it was prepared"),
    ],
)
def test_damage_is_seen(prepared: Path, name: str, change, message: str):
    damage(change, name, prepared)
    with pytest.raises(InputError, match=message.format(name=name)):
        opened(prepared)
    (prepared / name).unlink()
    with pytest.raises(InputError, match=f"{name}: is missing"):
        opened(prepared)


def test_large_shards_are_sampled(tmp_path: Path, prepared: Path):
    path = tmp_path / "large"
    data = np.random.default_rng(0).bytes(4 << 20)
    path.write_bytes(data)
    whole, sample = file_digest(path), file_digest(path, sample=True)
    for place in (0, len(data) - 1, (len(data) - (1 << 16)) // 15 * 3):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert file_digest(path, sample=True) != sample and file_digest(path) != whole
    between = 1 << 17
    path.write_bytes(data[:between] + bytes([data[between] ^ 1]) + data[between + 1 :])
    assert file_digest(path, sample=True) == sample and file_digest(path) != whole
    # Of files below 64 KiB a sample is everything.
    opened(prepared, whole=0)
    damage(lambda data: data[:-1] + b"\7", "shard-00002.tokens", prepared)
    with pytest.raises(InputError, match=r"shard-00002\.tokens: was changed"):
        opened(prepared, whole=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "parquet"}, "is no manifest of prepared shards"),
        ({"version": 2}, "shards of version 2, 1 is read here; prepare them again"),
        ({"dtype": "int8"}, "dtype: .*; the manifest is damaged"),
        ({"version": True}, "shards of version True, 1 is read here"),
        ({"dtype": "uint32"}, r"shard-00000.tokens: \d+ bytes do not fit 6 documents of \d+ tokens in all"),
        ({"shards": []}, "shards: .*; the manifest is damaged"),
        (
            {"kind": "chat"},
            "shard-00000 has the files offsets, tokens, those of kind chat are learned, offsets, tokens",
        ),
        ({"validation": {"documents": 1, "tokens": 1, "bytes": 1}}, "the division does not fit its 12 documents"),
        ({"surplus": 1}, "surplus: .*; the manifest is damaged"),
    ],
)
def test_a_damaged_manifest_is_refused(prepared: Path, changes: dict, message: str):
    edited(prepared, **changes)
    with pytest.raises(InputError, match=message) as caught:
        opened(prepared)
    assert "\n" not in str(caught.value)


def forged(prepared: Path, name: str, data: bytes, **counts: int) -> None:
    """Give a file of the first shard other bytes, and the manifest their size and digest."""
    (prepared / f"shard-00000.{name}").write_bytes(data)
    values = json.loads((prepared / "manifest.json").read_text())
    values["shards"][0] |= counts
    values["shards"][0]["files"][name] = FileFacts.of(prepared / f"shard-00000.{name}").model_dump()
    (prepared / "manifest.json").write_text(json.dumps(values))


@pytest.mark.parametrize("whole", [0, 1 << 30])
def test_a_token_outside_the_vocabulary_is_refused(prepared: Path, whole: int):
    ids = np.fromfile(prepared / "shard-00000.tokens", dtype="<u2")
    ids[-1] = VOCABULARY
    forged(prepared, "tokens", ids.tobytes())
    with pytest.raises(InputError, match=f"tokens: token id {VOCABULARY} is outside the vocabulary of {VOCABULARY}"):
        opened(prepared, whole)
    ids[-1] = VOCABULARY - 1
    forged(prepared, "tokens", ids.tobytes())
    opened(prepared, whole)


@pytest.mark.parametrize("name", ["tokens", "offsets"])
def test_files_that_do_not_fit_their_counts_are_refused(prepared: Path, name: str):
    data = (prepared / f"shard-00000.{name}").read_bytes()
    for changed in (b"", data[:-1], data + b"\0"):
        forged(prepared, name, changed)
        with pytest.raises(InputError, match=rf"{name}: {len(changed)} bytes do not fit 6 documents of \d+ tokens"):
            opened(prepared)
    forged(prepared, "offsets", b"", documents=0)
    with pytest.raises(InputError, match=r"shards\.0\.documents: .*; the manifest is damaged"):
        opened(prepared)


@pytest.mark.parametrize("change", [lambda o: o + 1, lambda o: o[::-1], lambda o: np.where(o == o[2], o[1], o)])
def test_offsets_that_are_no_borders_are_refused(prepared: Path, change):
    forged(prepared, "offsets", change(np.fromfile(prepared / "shard-00000.offsets", dtype="<i8")).tobytes())
    with pytest.raises(InputError, match=r"shard-00000\.offsets: does not fit the tokens of shard-00000"):
        opened(prepared)


def test_counts_of_the_manifest_are_checked(prepared: Path):
    side = json.loads((prepared / "manifest.json").read_text())["training"]
    edited(prepared, training=side | {"tokens": side["tokens"] + 1})
    with pytest.raises(InputError, match="its counts of tokens are not those of the shards; prepare the shards again"):
        opened(prepared)


def test_more_shards_than_files_a_process_may_open(tmp_path: Path, corpus: str):
    Path(corpus).write_text("\f".join(f"a tiny document {number}" for number in range(OPEN + 40)))
    manifest = prepare(corpus, tmp_path / "many", tokenizer(), shard_tokens=1)
    assert len(manifest.shards) == OPEN + 40
    limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + OPEN + 20, limits[1]))
    try:
        training, validation = opened(tmp_path / "many")
        seen = Counter(tokenizer().decode(document) for store in (training, validation) for document in store)
        batch = Packer(training, 8, training.tokens // 8).take(8, training.tokens // 8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert seen == Counter(f"a tiny document {number}" for number in range(OPEN + 40))
    assert np.bincount(batch.ids.ravel())[0] >= len(training) - 8


def test_shards_that_vanish_during_a_run_are_told(prepared: Path):
    training, _ = opened(prepared)
    store = TokenStore(
        [Part(MappedNumbers(prepared / "shard-00000.tokens", np.dtype("<u2"), 9, mapping()), np.arange(3))]
    )
    (prepared / "shard-00000.tokens").unlink()
    assert len(training[0]) == training.lengths[0]  # mapped at the start
    with pytest.raises(UndertowError, match=r"shard-00000\.tokens: was there at the start and cannot be read any more"):
        store.read(0, 0, 1)


def test_a_manifest_that_is_no_json_is_refused(prepared: Path):
    for text in ("{", "[" * 100_000, "[]"):
        (prepared / "manifest.json").write_text(text)
        with pytest.raises(InputError, match=r"manifest.json: (not JSON|is no manifest)"):
            opened(prepared)


def test_changed_data_does_not_go_on_from_a_cursor(prepared: Path, corpus: str, tmp_path: Path):
    training, _ = opened(prepared)
    cursor = Packer(training, 1, 8).cursor
    assert Packer(opened(prepared)[0], 1, 8, cursor=cursor).cursor == cursor
    prepare(corpus, tmp_path / "again", tokenizer(), validation_fraction=0.2, shard_tokens=150)
    assert Packer(opened(tmp_path / "again")[0], 1, 8, cursor=cursor).cursor == cursor
    prepare(corpus, tmp_path / "other", tokenizer(), validation_fraction=0.5, shard_tokens=150)
    for store in (opened(prepared)[1], opened(tmp_path / "other")[0]):
        with pytest.raises(InputError, match="does not belong to these documents and seed"):
            Packer(store, 1, 8, cursor=cursor)


def test_what_exists_is_not_replaced(prepared: Path, corpus: str):
    before = (prepared / "manifest.json").read_text()
    with pytest.raises(InputError, match="shards: exists already; name a new directory"):
        prepare(corpus, prepared, tokenizer())
    assert (prepared / "manifest.json").read_text() == before and is_prepared(str(prepared))
    with pytest.raises(InputError, match="is a directory of prepared shards already"):
        prepare(str(prepared), prepared.parent / "b", tokenizer())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation_fraction": 1.0}, "validation_fraction 1.0 must lie between"),
        ({"shard_tokens": 0}, "shard_tokens 0 must be at least 1"),
        ({"kind": "chat"}, "neither shipped"),
        ({"kind": "chat", "text_field": "body"}, "text_field 'body': kind chat reads prompt and response"),
        ({"split": "test"}, r"split 'test': corpus .* has no splits, only hf:NAME has"),
    ],
)
def test_bad_requests_leave_nothing(corpus: str, tmp_path: Path, options: dict, message: str):
    with pytest.raises(InputError, match=message):
        prepare(corpus, tmp_path / "out", tokenizer(), **options)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]


def test_a_file_name_that_is_no_text(tmp_path: Path):
    name = os.fsdecode(bytes(tmp_path) + b"/\xff.txt")
    Path(name).write_text("one\ftwo")
    prepare(name, tmp_path / "out", tokenizer())
    assert Manifest.read(tmp_path / "out").corpus == f"{tmp_path}/?.txt"


def test_bad_input_on_the_way_leaves_nothing(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' * 100 + '{"text": 3}\n')
    with pytest.raises(InputError, match="line 101: the field 'text' must be a string"):
        prepare(str(path), tmp_path / "out", tokenizer(), shard_tokens=20)
    assert [found.name for found in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_full_disk_is_told_and_leaves_nothing(corpus: str, tmp_path: Path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        with pytest.raises(UndertowError, match=r"out: cannot be written \(File too large\); nothing of it is kept"):
            prepare(corpus, tmp_path / "out", tokenizer())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]


def test_what_a_killed_process_left_is_removed_and_a_living_one_is_respected(corpus: str, tmp_path: Path):
    (tmp_path / ".out.writing").mkdir()
    (tmp_path / ".out.writing" / "shard-00007.tokens").write_bytes(b"left")
    with new_directory(tmp_path / "out") as fresh:
        assert list(fresh.iterdir()) == []
        with pytest.raises(InputError, match="out: another process is preparing it"):
            prepare(corpus, tmp_path / "out", tokenizer())
        assert fresh.is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.txt", "out"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("nx/..", "is not the name of a new directory"), ("x" * 300, r"cannot be made \(File name too long\)")],
)
def test_a_name_that_no_directory_can_have_is_refused(corpus: str, tmp_path: Path, name: str, message: str):
    with pytest.raises(InputError, match=message):
        prepare(corpus, tmp_path / name, tokenizer())
    with pytest.raises(InputError, match="neither shipped"):
        prepare("x" * 300, tmp_path / "out", tokenizer())
    assert os.listdir(tmp_path) == ["corpus.txt"]


def test_a_place_that_cannot_be_written_is_told(corpus: str, tmp_path: Path):
    with pytest.raises(InputError, match=r"corpus.txt/out: cannot be made \((File exists|Not a directory)\)"):
        prepare(corpus, tmp_path / "corpus.txt" / "out", tokenizer())
    assert os.listdir(tmp_path) == ["corpus.txt"]
