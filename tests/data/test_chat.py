"""Conversations: the format, what is learned of it, and records that are none."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.chatty import ANSWER_ID, ASSISTANT_ID, USER_ID, chat_tokenizer, text_ids
from undertow.config.errors import InputError
from undertow.data.chat import Conversation, Message, conversation, encode_conversations, read_conversations
from undertow.data.encoding import Example
from undertow.data.records import Record
from undertow.data.tokenizer import BOS, EOS, Tokenizer

MARKERS = ("<｜User｜>", "<｜Assistant｜>", "</think>", "<think>")
SMALL = Tokenizer.from_name("bpe-2048")


def encoded(tokenizer: Tokenizer, **values) -> Example:
    (example,) = encode_conversations([conversation(Record(values, "line 1", "here"))], tokenizer)
    return example


def test_markers_are_tokens_and_only_answers_are_learned():
    example = encoded(chat_tokenizer(), system="Be brief.", prompt="To be?", response="Not to be.")
    before = [0, *text_ids("Be brief."), USER_ID, *text_ids("To be?"), ASSISTANT_ID, ANSWER_ID]
    after = [*text_ids("Not to be."), 1]
    assert example.ids.tolist() == before + after
    assert example.learned is not None
    assert example.learned.tolist() == [False] * len(before) + [True] * len(after)
    assert example.size == len("Be brief.To be?Not to be.")


def test_every_answer_of_a_long_conversation_is_learned():
    said = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    example = encoded(chat_tokenizer(), messages=[{"role": role, "content": text} for role, text in said])
    wanted = [0, "s", USER_ID, "a", ASSISTANT_ID, ANSWER_ID, "b", 1, USER_ID, "c", ASSISTANT_ID, ANSWER_ID, "d", 1]
    assert example.ids.tolist() == [text_ids(part)[0] if isinstance(part, str) else part for part in wanted]
    assert example.learned is not None
    assert [int(x) for x in example.learned] == [0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]


def test_markers_are_text_where_the_tokenizer_lacks_them():
    example = encoded(SMALL, prompt="Who's there?", response="Nay, answer me")
    asked = SMALL.encode("<｜User｜>Who's there?<｜Assistant｜></think>")
    answer = [*SMALL.encode("Nay, answer me"), 1]
    assert example.ids.tolist() == [0, *asked, *answer]
    assert example.learned is not None
    assert example.learned.tolist() == [False] * (1 + len(asked)) + [True] * len(answer)


@pytest.mark.parametrize("tokenizer", [SMALL, chat_tokenizer()], ids=["without markers", "with markers"])
@given(
    texts=st.lists(st.text("ab<｜>é 1", min_size=1, max_size=8), min_size=2, max_size=2),
    forged=st.sampled_from([BOS, EOS, *MARKERS]),
)
def test_no_text_forges_a_marker_and_all_text_survives(tokenizer: Tokenizer, texts: list[str], forged: str):
    prompt, response = texts[0] + forged, forged + texts[1]
    example = encoded(tokenizer, prompt=prompt, response=response)
    whole = f"{BOS}<｜User｜>{prompt}<｜Assistant｜></think>{response}{EOS}"
    assert tokenizer.decode(example.ids, specials=True) == whole
    markers = [] if tokenizer is SMALL else [USER_ID, ASSISTANT_ID, ANSWER_ID]
    controls = {tokenizer.bos_id, tokenizer.eos_id} | {tokenizer.added_id(m) for m in MARKERS} - {None}
    assert [id for id in example.ids.tolist() if id in controls] == [0, *markers, 1]
    assert tokenizer.decode(example.ids[example.learned], specials=True) == response + EOS


def test_records_of_both_forms_are_read_from_both_kinds_of_file(tmp_path: Path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"prompt": "a", "response": "b", "system": "s", "id": 7}, {"messages": turns, "prompt": None}]
    wanted = [Message("user", "a"), Message("assistant", "b")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([{**rows[0], "messages": None}, rows[1]]), tmp_path / "b.parquet")
    both = [Conversation((Message("system", "s"), *wanted)), Conversation(tuple(wanted))]
    for name in ("a.jsonl", "b.parquet"):
        assert list(read_conversations(str(tmp_path / name))) == both
    assert list(read_conversations(str(tmp_path))) == both * 2
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_parquet(str(tmp_path / "b.parquet")).save_to_disk(tmp_path / "hub")
    assert list(read_conversations(f"hf:{tmp_path / 'hub'}")) == both


def turns(*roles: str) -> dict:
    return {"messages": [{"role": role, "content": "x"} for role in roles]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a"], "expected an object with 'prompt' and 'response', or with 'messages'"),
        ({"text": "a"}, "expected an object with 'prompt' and 'response', or with 'messages'"),
        ({"prompt": "a", **turns("user", "assistant")}, "expected an object with 'prompt' and 'response', or"),
        ({"prompt": "a"}, "response must be a non-empty string, it is missing"),
        ({"prompt": "", "response": "b"}, "prompt must be a non-empty string, it is empty"),
        ({"prompt": "a", "response": 3}, "response must be a non-empty string, it is a int"),
        ({"prompt": "a", "response": "\ud83d"}, "the text holds half a surrogate pair"),
        ({"prompt": "a", "response": "b", "system": 1}, "system must be a non-empty string, it is a int"),
        ({"messages": []}, "'messages' must be a list of at least one"),
        ({"messages": "a"}, "'messages' must be a list of at least one"),
        ({"messages": ["a"]}, "message 1 must be an object with 'role' and 'content'"),
        (turns("user", "tool"), "message 2 has the role 'tool'; allowed: system, user, assistant"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, r"message 1 has the role \['user'\]"),
        ({"messages": [{"role": "user"}]}, "message 1's content must be a non-empty string, it is missing"),
        (turns("user"), "the roles are user; allowed: system or nothing, then user and assistant by turns"),
        (turns("system"), "the roles are system; allowed"),
        (turns("assistant", "user"), "the roles are assistant, user; allowed"),
        (turns("user", "assistant", "assistant", "user"), "the roles are user, assistant, assistant, user; allowed"),
        ({**turns("system", "user", "assistant"), "system": "s"}, "the roles are system, system, user, assistant"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": [1]}]},
            "message 2 has 'tool_calls', which this chat format does not carry",
        ),
    ],
)
def test_records_that_are_no_conversation_are_refused(values, message: str):
    with pytest.raises(InputError, match=f"^here: {message}") as caught:
        conversation(Record(values, "line 1", "here"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "a", "response": "b"}\n{"prompt": "a"}', r"a.jsonl', line 2: response must be"),
        ("a.jsonl", "\n", "is empty: it needs conversations"),
        ("a.txt", "a", "neither shipped .* nor a .jsonl or .parquet file"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: str, message: str):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        list(read_conversations(str(tmp_path / name)))


def test_plain_text_is_no_chat():
    with pytest.raises(InputError, match="'plays' is plain text; kind chat needs records"):
        next(read_conversations("plays"))
