"""Conversations: the format, what is learned of it, and records that are none."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.chatty import ANSWER_ID, ASSISTANT_ID, USER_ID, chat_tokenizer, text_ids
from undertow.config.errors import InputError
from undertow.data.chat import (
    Conversation,
    Message,
    ToolCall,
    conversation,
    encode_conversations,
    read_conversations,
)
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


TURNS = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
FUNCTION = {"name": "f", "arguments": '{"a": "b"}'}
CALL = {"id": "1", "type": "function", "function": FUNCTION}
CALLED = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
    {"role": "tool", "content": "", "tool_call_id": "1"},
    {"role": "assistant", "content": "y", "reasoning_content": "q"},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_reasoning_and_tool_calls_are_learned():
    """With tools, reasoning of all turns is; results and the tools themselves are not."""
    example = encoded(chat_tokenizer(), messages=CALLED, tools=[TOOL])
    assert example.learned is not None
    learned = chat_tokenizer().decode(example.ids[example.learned], specials=True)
    block = '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">b'
    close = "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    assert learned == f"r</think>{block}{close}{EOS}q</think>y{EOS}"
    text = chat_tokenizer().decode(example.ids)
    assert "## Tools" in text and "<｜User｜><tool_result></tool_result><｜Assistant｜><think>q" in text
    assert example.size == len("x" + "r" + 'f{"a": "b"}' + "y" + "q")
    assert encoded(chat_tokenizer(), messages=CALLED, tools=json.dumps([TOOL])).ids.tolist() == example.ids.tolist()


def test_calls_are_read_from_parquet_which_fills_in_empty_values(tmp_path: Path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": CALLED, "tools": json.dumps([TOOL])}, {"messages": TURNS, "tools": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = read_conversations(str(tmp_path / "a.parquet"))
    assert [first, second] == list(read_conversations(str(tmp_path / "a.jsonl")))
    assert first.messages[0] == Message("system", tools=(TOOL["function"],))
    assert first.messages[2] == Message("assistant", "", "r", (ToolCall("f", '{"a": "b"}', "1"),))
    assert second == Conversation((Message("user", "x"), Message("assistant", "y")))


def test_effort_is_that_of_the_record_or_high_where_an_assistant_reasons():
    record = {"prompt": "x", "response": "y"}
    assert [conversation(Record(values, "", "")).effort for values in (
        record, {**record, "effort": "max"}, {**record, "effort": ""}, {"messages": CALLED},
    )] == ["none", "max", "none", "high"]  # fmt: skip
    thought = encoded(chat_tokenizer(), messages=CALLED)
    text = chat_tokenizer().decode(thought.ids)
    assert "r</think>" not in text and text.endswith("<think>q</think>y")


def test_arguments_may_be_an_object_and_content_a_list():
    call = {"function": {"name": "f", "arguments": {"a": "b"}}}
    content = [{"type": "text", "text": "x"}, {"type": "text", "text": "z"}]
    messages = [{**CALLED[0], "content": content}, {**CALLED[1], "tool_calls": [call]}, *CALLED[2:]]
    first, second, *_ = conversation(Record({"messages": messages}, "", "")).messages
    assert first.content == "x\n\nz"
    assert second.calls == (ToolCall("f", '{"a": "b"}'),)


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
        (
            turns("user", "human"),
            "message 2 has the role 'human'; allowed: system, user, assistant, tool, developer, latest",
        ),
        (turns("user", "tool"), "the roles are user, tool; allowed"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, r"message 1 has the role \['user'\]"),
        ({"messages": [{"role": "user"}]}, "message 1's content must be a string, it is missing"),
        (
            {"messages": [{"role": "user", "content": ""}]},
            "message 1's content must be a non-empty string, it is empty",
        ),
        (turns("user"), "the roles are user; allowed: system or nothing, then user"),
        (turns("system"), "the roles are system; allowed"),
        (turns("assistant", "user"), "the roles are assistant, user; allowed"),
        (turns("user", "assistant", "assistant", "user"), "the roles are user, assistant, assistant, user; allowed"),
        ({**turns("system", "user", "assistant"), "system": "s"}, "the roles are system, system, user, assistant"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": [1]}]},
            "message 2's tool call 1 must be .*, it is a int",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
            "message 1 has 'tool_calls', which this chat format does not carry for the role user",
        ),
        (
            {"messages": [*TURNS, {"role": "user", "content": [{"type": "image_url"}]}]},
            "message 3's content: part 1 is no {type: text, text: ...}; the model reads text alone",
        ),
        ({"messages": [*TURNS[:1], {**TURNS[1], "prefix": True}]}, "message 2 is a prefix, which has no end"),
        (
            {"messages": [TURNS[0], {**TURNS[1], "reasoning": "r"}], "effort": "none"},
            "effort is none, but an assistant",
        ),
        ({"messages": TURNS, "effort": "low"}, "effort is 'low'; allowed: none, high, max"),
        ({"messages": TURNS, "tools": "x"}, "'tools' is a text but no JSON: 'x'"),
        (
            {"messages": TURNS, "tools": [{"type": "function", "function": {"name": "f", "description": "\ud83d"}}]},
            "the text holds half a surrogate pair",
        ),
        ({"messages": TURNS, "tools": [{"name": "f"}]}, "tool 1 must be .*, it is another object"),
        (
            {
                "messages": [
                    TURNS[0],
                    {"role": "assistant", "tool_calls": [CALL, {"function": {**FUNCTION, "name": "a\nb"}}]},
                ]
            },
            r"message 2's tool call 2: the call of 'a\\nb' has the function name 'a\\nb' with a line break; a name ",
        ),
        ({"messages": [{"role": "user", "content": "x", "task": "sing"}, TURNS[1]]}, "message 1 has the task 'sing'"),
        (
            {
                "messages": [
                    TURNS[0],
                    {"role": "assistant", "tool_calls": [{"function": {**FUNCTION, "arguments": "3"}}]},
                ]
            },
            "message 2's tool call 1: the call of 'f' has the arguments 3; they must be the text of a JSON object",
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
