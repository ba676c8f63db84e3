"""Prompts, byte by byte: as written down here, and as an independent encoder of the format makes them."""

import json
from dataclasses import replace

import pytest

from tests.data.dsv4 import encoder
from tests.data.talks import Talk
from undertow.config.errors import InputError
from undertow.data.chat import (
    TASKS,
    Effort,
    Message,
    ToolCall,
    opens_answer,
    read_messages,
    render,
    text_of,
    with_tools,
)
from undertow.data.chat.wording import UTMOST_EFFORT

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
ASKED = [Message("system", "s"), Message("user", "u")]
ANSWERED = [*ASKED, Message("assistant", "a", "r"), Message("user", "v"), Message("assistant", "b", "q")]
TOOL = {"name": "f", "description": "é", "parameters": {"type": "object"}}
CALLS = (ToolCall("f", '{"s":"q\\"<","n":[1,{"k":null}]}', "one"), ToolCall("g", "{}", "two"))
CALLED = [
    Message("user", "u"),
    Message("assistant", "c", "r", CALLS),
    Message("tool", "2nd", call_id="two"),
    Message("tool", "1st", call_id="one"),
    Message("user", "and?"),
]
BLOCK = """

<｜DSML｜tool_calls>
<｜DSML｜invoke name="f">
<｜DSML｜parameter name="s" string="true">q"<</｜DSML｜parameter>
<｜DSML｜parameter name="n" string="false">[1, {"k": null}]</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="g">

</｜DSML｜invoke>
</｜DSML｜tool_calls>"""


def deep() -> dict:
    """Objects within objects, deeper than JSON is written."""
    value: dict = {}
    for _ in range(100_000):
        value = {"a": value}
    return value


def written(messages, effort="none", keep_reasoning=False) -> str:
    text = text_of(render(messages, effort, keep_reasoning))
    assert text.startswith(BEGIN)
    return text.removeprefix(BEGIN)


@pytest.mark.parametrize("share", range(4))
def test_five_hundred_conversations_equal_those_of_an_independent_encoder(share: int):
    for seed in range(share, 500, 4):
        values = Talk(seed, markers=seed % 3 == 0).messages()
        for effort in ("none", "high", "max"):
            for keep in (False, True):
                theirs = encoder().encode_messages(
                    [dict(value) for value in values],
                    "chat" if effort == "none" else "thinking",
                    drop_thinking=not keep,
                    reasoning_effort=None if effort == "none" else effort,
                )
                ours = text_of(render(read_messages(values, "here"), effort, keep))
                assert ours == theirs, (seed, effort, keep)


def test_what_the_conversations_cover():
    """All roles, tasks and argument kinds, and each often."""
    drawn = [message for seed in range(500) for message in Talk(seed, markers=seed % 3 == 0).messages()]
    roles = [message["role"] for message in drawn]
    assert min(roles.count(role) for role in set(roles)) > 50 and len(set(roles)) == 6
    assert {message.get("task") for message in drawn} == {None, *TASKS}
    assert sum(len(message.get("tool_calls", [])) > 1 for message in drawn) > 200
    assert sum(bool(message.get("tools")) for message in drawn) > 100
    assert sum(message["content"] == "" for message in drawn) > 200


def test_effort_chooses_how_an_answer_opens():
    assert written(ASKED) == "s<｜User｜>u<｜Assistant｜></think>"
    assert written(ASKED, "high") == "s<｜User｜>u<｜Assistant｜><think>"
    assert written(ASKED, "max") == UTMOST_EFFORT + "s<｜User｜>u<｜Assistant｜><think>"
    assert UTMOST_EFFORT.startswith("Reasoning Effort: Absolute maximum") and UTMOST_EFFORT.endswith(".\n\n")


def test_reasoning_before_the_last_question_is_dropped():
    first, second = "<｜User｜>u<｜Assistant｜>", "<｜User｜>v<｜Assistant｜>"
    dropped = f"s{first}</think>a{END}{second}<think>q</think>b{END}"
    kept = f"s{first}<think>r</think>a{END}{second}<think>q</think>b{END}"
    assert written(ANSWERED) == f"s{first}</think>a{END}{second}</think>b{END}"
    assert written(ANSWERED, "high") == dropped
    assert written(ANSWERED, "high", keep_reasoning=True) == kept
    tools = with_tools(ANSWERED, [TOOL])
    assert written(tools, "high").endswith(kept.removeprefix("s"))
    developer = [*ANSWERED[:3], Message("developer", "d"), *ANSWERED[2:]]
    assert written(developer, "high").startswith(f"s{first}</think>a{END}a{END}{second}")
    assert f"<｜User｜>d<｜Assistant｜></think>a{END}" in written(developer)


def test_calls_and_results_in_the_order_of_the_calls():
    results = "<tool_result>1st</tool_result>\n\n<tool_result>2nd</tool_result>\n\nand?"
    wanted = f"<｜User｜>u<｜Assistant｜></think>c{BLOCK}{END}<｜User｜>{results}<｜Assistant｜></think>"
    assert written(CALLED) == wanted
    unknown = [replace(message, call_id="three") if message.content == "2nd" else message for message in CALLED]
    assert "<tool_result>2nd</tool_result>\n\n<tool_result>1st" in written(unknown)


def test_tools_and_response_format_follow_the_system_text():
    text = written(with_tools(ASKED, [TOOL, {"name": "g"}], {"type": "object"}))
    schemas = '{"name": "f", "description": "é", "parameters": {"type": "object"}}\n{"name": "g"}'
    before, after = text.split(schemas)
    assert before.startswith("s\n\n## Tools\n\nYou have access") and before.endswith("Tool Schemas\n\n")
    assert after.startswith("\n\nYou MUST strictly follow the above")
    assert after.endswith('schema to reply:\n{"type": "object"}<｜User｜>u<｜Assistant｜></think>')
    assert written(with_tools(ASKED[1:], [TOOL])).startswith("\n\n## Tools")
    assert with_tools(ASKED, []) == tuple(ASKED)


def test_tasks_reminders_and_prefixes():
    user = Message("user", "u", task="query")
    assert written([user]) == "<｜User｜>u<｜query｜>"
    assert written([replace(user, task="action")], "high") == "<｜User｜>u<｜Assistant｜><think><｜action｜>"
    titled = [*ASKED, Message("assistant", "a", task="title"), Message("assistant", "t", "r")]
    assert written(titled, "high") == f"s<｜User｜>u<｜Assistant｜><think></think>a{END}<｜title｜>t{END}"
    reminded = [Message("latest_reminder", "now"), Message("user", "u")]
    assert written(reminded) == "<｜latest_reminder｜>now<｜User｜>u<｜Assistant｜></think>"
    prefix = [*ASKED, Message("assistant", "To be", "r", prefix=True)]
    assert written(prefix, "high") == "s<｜User｜>u<｜Assistant｜><think>r</think>To be"


@pytest.mark.parametrize("effort", ["none", "high", "max"])
@pytest.mark.parametrize(
    ("last", "opens"),
    [
        (Message("user", "x"), True),
        (Message("tool", "x"), True),
        (Message("developer", "x"), True),
        (Message("system", "x"), False),
        (Message("latest_reminder", "x"), False),
        (Message("assistant", "x"), False),
        (Message("assistant", "x", prefix=True), True),
        (Message("system", "x", task="title"), True),
        (Message("latest_reminder", "x", task="action"), True),
    ],
)
def test_which_messages_open_an_answer(last: Message, opens: bool, effort: Effort):
    text = text_of(render([Message("user", "u"), last], effort))
    marker = next((each for each in ("<think>", "</think>", *TASKS.values()) if text.endswith(each)), None)
    assert opens_answer([Message("user", "u"), last]) is opens
    assert opens is (marker is not None or (last.prefix and text.endswith("x")))
    assert not opens_answer([])


def test_only_what_an_assistant_says_is_learned():
    pieces = render([*CALLED, Message("assistant", "d", "q")], "high", keep_reasoning=True)
    learned = "".join(piece.text for piece in pieces if piece.learned)
    assert learned == f"r</think>c{BLOCK}{END}q</think>d{END}"
    assert not any(piece.learned for piece in render([*ASKED, Message("assistant", "To be", prefix=True)]))


@pytest.mark.parametrize(
    ("message", "effort", "told"),
    [
        (Message("human", "x"), "none", "message 1 has the role 'human'; allowed: system, user, assistant, tool"),
        (Message("user", "x", task="sing"), "none", "message 1 has the task 'sing'; allowed: action, query"),
        (Message("user", "x", tools=(TOOL,)), "none", "message 1 of the role user has tools; the roles system and"),
        (Message("user", "x", response_format={"a": 1}), "none", "message 1 of the role user has a response_format"),
        (Message("developer"), "none", "message 1 of the role developer is empty"),
        (
            Message("assistant", calls=(ToolCall("f", "[1]"),)),
            "none",
            "the call of 'f' has the arguments \\[1\\]",
        ),
        *(
            (
                Message("assistant", calls=(ToolCall("f", json.dumps({name: 1})),)),
                "none",
                f"the call of 'f' has the parameter name '.*' with {fault}; a name has at most 1024 characters, no",
            )
            for name, fault in (
                ("a\nb", "a line break"),
                ('a" string="true">', '">'),
                ('a">', '">'),
                ("x" * 1025, "1025 characters"),
            )
        ),
        (Message("assistant", calls=(ToolCall('f">', "{}"),)), "none", "the call of 'f\">' has the function name"),
        (Message("system", tools=({"name": {1}},)), "none", "a value cannot be written as JSON"),
        (Message("system", response_format=deep()), "none", "a value cannot be written as JSON"),
        (Message("user", "x"), "low", "effort 'low' is unknown; allowed: none, high, max"),
    ],
)
def test_what_the_format_cannot_say_is_refused(message: Message, effort, told: str):
    with pytest.raises(InputError, match=f"^{told}") as caught:
        render([message], effort)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e400", "[1, NaN]", '1, "a": 2', '"\\udc00"', '{"\\ud800": 1}'])
def test_what_json_has_not_or_would_be_lost_makes_the_arguments_one_string(value: str):
    arguments = f'{{"a": {value}}}'
    text = written([Message("user", "u"), Message("assistant", "c", calls=(ToolCall("f", arguments),))])
    assert f'<｜DSML｜parameter name="arguments" string="true">{arguments}</｜DSML｜parameter>' in text
    assert text.count("parameter name=") == 1


def test_a_name_of_the_longest_length_is_written():
    call = ToolCall("f", json.dumps({"x" * 1024: 1}))
    assert "x" * 1024 in written([Message("user", "u"), Message("assistant", "c", calls=(call,))])


@pytest.mark.parametrize("arguments", [{"a": {1}}, {"a": deep()}])
def test_arguments_that_are_no_json_values_are_refused(arguments: dict):
    said = {"role": "assistant", "content": "c", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    with pytest.raises(InputError, match=r"^here: message 1's tool call 1's arguments: a value cannot be written"):
        read_messages([said], "here")


def test_keys_of_any_kind_are_refused():
    with pytest.raises(InputError, match=r"^here: message 1 has '1', which this chat format does not carry"):
        read_messages([{"role": "user", "content": "u", 1: 2, "z": 3}], "here")
