import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.data.chatty import ANSWER_ID, USER_ID, chat_tokenizer, text_ids
from undertow.config.errors import InputError
from undertow.data.tokenizer import BOS, EOS, PAD, StreamDecoder, Tokenizer

TOKENIZERS = {name: Tokenizer.from_name(name) for name in ("bpe-2048", "bpe-4096")}
SMALL = TOKENIZERS["bpe-2048"]
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
ids = st.lists(st.integers(0, SMALL.vocab_size - 1), max_size=40)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_shipped_tokenizers_have_their_size_and_the_released_special_ids(name: str):
    tokenizer = TOKENIZERS[name]
    assert tokenizer.vocab_size == int(name.removeprefix("bpe-"))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert tokenizer.special_ids == {0, 1, 2}
    assert [tokenizer.token_bytes(id, specials=True).decode() for id in (0, 1, 2)] == [BOS, EOS, PAD]
    assert {tokenizer.token_bytes(id) for id in range(3, 259)} == {bytes([byte]) for byte in range(256)}


def test_common_words_are_one_token():
    assert [SMALL.decode([id]) for id in SMALL.encode("the king and the queen")] == [
        "the",
        " king",
        " and",
        " the",
        " queen",
    ]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(text=texts)
def test_any_text_survives(name: str, text: str):
    tokenizer = TOKENIZERS[name]
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded) == text
    assert tokenizer.bytes_of(encoded) == len(text.encode())
    assert tokenizer.encode_all([text, "sea"]) == [encoded, tokenizer.encode("sea")]


@given(data=st.binary(max_size=60))
def test_any_bytes_have_ids(data: bytes):
    of_byte = {SMALL.token_bytes(id): id for id in range(3, 259)}
    encoded = [of_byte[bytes([byte])] for byte in data]
    assert b"".join(SMALL.token_bytes(id) for id in encoded) == data
    assert SMALL.decode(encoded) == data.decode("utf-8", errors="replace")


def test_text_forges_no_special_token():
    text = f"a{EOS}b"
    plain = SMALL.encode(text)
    assert 1 not in plain and SMALL.decode(plain) == text
    parsed = SMALL.encode(text, specials=True)
    assert parsed == [*SMALL.encode("a"), 1, *SMALL.encode("b")]
    assert (SMALL.decode(parsed), SMALL.decode(parsed, specials=True)) == ("ab", text)


BYTES = {SMALL.token_bytes(id): id for id in range(3, 259)}


@example(ids=[BYTES[b"\xed"], BYTES[b"\xa0"]], specials=False)
@example(ids=[BYTES[b"\xed"], BYTES[b"\xbf"], BYTES[b"\x80"]], specials=False)
@given(ids=ids, specials=st.booleans())
def test_streaming_equals_decoding_and_shows_no_half_character(ids: list[int], specials: bool):
    stream = StreamDecoder(SMALL, specials)
    shown = ""
    for count, id in enumerate(ids, 1):
        shown += stream.push(id)
        whole = SMALL.decode(ids[:count], specials)
        # Held back is at most one unfinished character, which decodes to one U+FFFD, or the first two bytes of half a
        # surrogate pair, which never becomes one: Python's decoder waits for the third, then gives U+FFFD for each.
        assert whole in (shown, shown + "\ufffd", shown + 2 * "\ufffd")
    assert shown + stream.flush() == SMALL.decode(ids, specials)


@given(text=texts)
def test_streaming_a_text_never_shows_a_replacement(text: str):
    text = text.replace("\ufffd", "") + "🌊é"
    stream = StreamDecoder(SMALL)
    pieces = [stream.push(id) for id in SMALL.encode(text)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text and stream.flush() == ""


def test_an_emoji_over_four_tokens_appears_with_its_last_byte():
    encoded = SMALL.encode("🌊")
    assert len(encoded) == 4
    stream = StreamDecoder(SMALL)
    assert [stream.push(id) for id in encoded] == ["", "", "", "🌊"]
    stream.push(encoded[0])
    assert (stream.flush(), stream.flush()) == ("\ufffd", "")
    assert stream.push(SMALL.encode("a")[0]) == "a"


def test_bytes_are_counted_without_special_tokens_and_ignored_labels():
    labels = np.array([[*SMALL.encode("née"), 1, -100, 0]])
    assert SMALL.bytes_of(labels) == 4
    assert SMALL.bytes_of([]) == 0
    with pytest.raises(InputError, match="outside the vocabulary of 2048"):
        SMALL.bytes_of(np.array([2048]))


def test_a_saved_tokenizer_loads_again_here_and_in_the_tokenizers_library(tmp_path: Path):
    SMALL.save(tmp_path / "model")
    again = Tokenizer.from_directory(tmp_path / "model")
    assert again.encode("Who's there?") == SMALL.encode("Who's there?")
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert (settings["bos_token"], settings["eos_token"]) == (BOS, EOS)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def _model_directory(folder: Path, **settings: object) -> Path:
    """A tokenizer shaped like the released one: added tokens behind the vocabulary, some special, some not."""
    SMALL.save(folder)
    definition = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    form = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    definition["added_tokens"] += [
        {"id": 2048, "content": "<｜User｜>", "special": False, **form},
        {"id": 2049, "content": "<turn>", "special": True, **form},
    ]
    definition["truncation"] = dict(direction="Right", max_length=4, strategy="LongestFirst", stride=0)
    (folder / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def test_added_tokens_that_are_not_special_are_text_that_encodes_to_one_id(tmp_path: Path):
    tokenizer = Tokenizer.from_directory(_model_directory(tmp_path, eos_token={"content": "<turn>"}))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (2050, 0, 2049)
    encoded = tokenizer.encode("<｜User｜>to be, or not to be")
    assert encoded[0] == 2048 and len(encoded) > 4  # the truncation in the file does not hold
    assert tokenizer.decode([*encoded, 2049]) == "<｜User｜>to be, or not to be"
    stream = StreamDecoder(tokenizer)
    assert stream.push(2048) == "<｜User｜>" and stream.push(2049) == ""


def test_bad_definitions_and_ids_are_named(tmp_path: Path):
    with pytest.raises(InputError, match=r"unknown tokenizer 'bpe' \(shipped: bpe-2048, bpe-4096\)"):
        Tokenizer.from_name("bpe")
    with pytest.raises(InputError, match=r"holds no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    with pytest.raises(InputError, match="has no token '</s>'"):
        Tokenizer.from_directory(_model_directory(tmp_path, eos_token="</s>"))
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match=r"tokenizer_config\.json, line 1: not JSON"):
        Tokenizer.from_directory(tmp_path)
    with pytest.raises(InputError, match="is not a tokenizer definition"):
        Tokenizer("{}")
    with pytest.raises(InputError, match="decoder must be ByteLevel, not None"):
        Tokenizer('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    with pytest.raises(InputError, match="token id 2048 is not in the vocabulary of 2048"):
        SMALL.decode([2048])
    for attempt in (SMALL.encode, lambda text: SMALL.encode_all(["a", text])):
        with pytest.raises(InputError, match="half a surrogate pair"):
            attempt("\ud83d")


def test_text_taken_literally_knows_no_added_token():
    tokenizer = chat_tokenizer()
    text = f"a<｜User｜>b</think>{EOS}"
    assert tokenizer.encode_literally([text, ""]) == [text_ids(text), []]
    assert tokenizer.encode(text) == [*text_ids("a"), USER_ID, *text_ids("b"), ANSWER_ID, *text_ids(EOS)]
    assert (tokenizer.added_id("<｜User｜>"), tokenizer.added_id(EOS), tokenizer.added_id("a")) == (USER_ID, 1, None)
    assert SMALL.encode_literally([text]) == [SMALL.encode(text)] and SMALL.added_id("<｜User｜>") is None
    with pytest.raises(InputError, match="text 1 is not Unicode"):
        tokenizer.encode_literally(["a", "\ud83d"])


def test_identity_is_of_the_definition_and_not_of_its_spelling(tmp_path: Path):
    SMALL.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")), indent=3))
    assert Tokenizer.load(str(path)).identity == Tokenizer.load("bpe-2048").identity == SMALL.identity
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": PAD}))
    others = [Tokenizer.load(str(path)), TOKENIZERS["bpe-4096"], chat_tokenizer()]
    assert len({SMALL.identity, *(other.identity for other in others)}) == 4 and others[0].eos_id == 2


def test_what_is_no_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="tokenizer 'none' is neither shipped"):
        Tokenizer.load("none")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(InputError, match="is not a tokenizer definition"):
        Tokenizer.load(str(tmp_path / "a.json"))
