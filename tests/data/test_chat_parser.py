"""Answers as they are generated: events, however the text is cut, and what malformed output becomes."""

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.chatty import ANSWER_ID, chat_tokenizer, text_ids
from tests.data.dsv4 import encoder, released_tokenizer
from tests.data.talks import Talk
from undertow.data.chat import (
    CallArguments,
    CallEnd,
    CallStart,
    ChatParser,
    Content,
    End,
    Event,
    Message,
    Reasoning,
    TokenParser,
    ToolCall,
    encode,
    joined,
    message_of,
    read_messages,
    render,
    text_of,
)
from undertow.data.tokenizer import Tokenizer

END = "<｜end▁of▁sentence｜>"
BLOCK, INVOKE = "<｜DSML｜tool_calls>", '<｜DSML｜invoke name="'
OPEN = f'\n\n{BLOCK}\n{INVOKE}f">\n'
CLOSE = "\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
STRING = '<｜DSML｜parameter name="a" string="true">'
JSON = '<｜DSML｜parameter name="b" string="false">'
SHUT = "</｜DSML｜parameter>"
PARTS = [
    "\n", "\n\n", " ", "a", "<", "</", "é🙂", '"', "\\", "｜DSML｜", "<think>", "</think>", END, OPEN, CLOSE,
    STRING, JSON, SHUT, BLOCK, "</｜DSML｜tool_calls>", INVOKE, f'{INVOKE}f">', "</｜DSML｜invoke>",
    '">', '" string="true">', "\udc00", f"{OPEN}{STRING}v{SHUT}{CLOSE}",
]  # fmt: skip


def parsed(text: str, thinking: bool = False, cuts: tuple[int, ...] = ()) -> list[Event]:
    parser = ChatParser(thinking)
    places = pairwise([0, *cuts, len(text)])
    pushed = [event for start, stop in places for event in parser.push(text[start:stop])]
    return joined([*pushed, *parser.finish()])


@given(st.lists(st.sampled_from(PARTS), max_size=12), st.booleans(), st.data())
def test_one_character_at_a_time_is_as_good_as_all_at_once(parts: list[str], thinking: bool, data: st.DataObject):
    text = "".join(parts)
    whole = parsed(text, thinking)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=4))
    assert parsed(text, thinking, tuple(range(1, len(text)))) == whole == parsed(text, thinking, tuple(sorted(cuts)))
    ends = [event for event in whole if isinstance(event, End)]
    assert ends == [whole[-1]]
    starts = [event.index for event in whole if isinstance(event, CallStart)]
    assert starts == list(range(len(starts)))
    if END not in text and not starts:
        said = "".join(event.text for event in whole if isinstance(event, Reasoning | Content))
        assert said == (text.replace("</think>", "", 1) if thinking else text)


def is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


def answers(markers: bool) -> list[tuple[Message, str, str, bool]]:
    """Assistants' messages, the prompt and answer of each as text, and whether it reasons."""
    found = []
    for seed in range(200):
        talk = Talk(seed, markers)
        thinking = talk.chance(0.5)
        calls = [call for call in talk.calls() if is_object(call["function"]["arguments"])]
        value = {"role": "assistant", "content": talk.text(), "tool_calls": calls if talk.chance(0.7) else []}
        value["reasoning_content"] = talk.text() if thinking else ""
        messages = read_messages([{"role": "user", "content": "u"}, value], "here")
        effort = "high" if thinking else "none"
        prompt = text_of(render(messages[:1], effort))
        found.append((messages[1], prompt, text_of(render(messages, effort)).removeprefix(prompt), thinking))
    return found


def plain(message: Message) -> tuple:
    calls = [(call.name, json.loads(call.arguments)) for call in message.calls]
    return message.content, message.reasoning, calls


def test_what_was_written_is_read_again_and_as_an_independent_parser_reads_it():
    for message, _, text, thinking in answers(markers=False):
        events = parsed(text, thinking)
        found = message_of(events)
        assert plain(found) == plain(message)
        assert events[-1] == End(len(message.calls), whole=True)
        theirs = encoder().parse_message_from_completion_text(text, "thinking" if thinking else "chat")
        assert (found.content, found.reasoning) == (theirs["content"], theirs["reasoning_content"])
        assert [call.arguments for call in found.calls] == [
            call["function"]["arguments"] for call in theirs["tool_calls"]
        ]


@pytest.mark.parametrize("load", [released_tokenizer, chat_tokenizer, lambda: Tokenizer.from_name("bpe-2048")])
def test_tokens_are_read_as_their_text_is(load):
    tokenizer = load()
    for message, _, _, thinking in answers(markers=False)[:80]:
        effort = "high" if thinking else "none"
        size = len(encode([Message("user", "u")], tokenizer, effort).ids)
        ids = encode([Message("user", "u"), message], tokenizer, effort).ids[size:].tolist()
        parser = TokenParser(tokenizer, thinking)
        events = [event for id in ids for event in parser.push(id)] + parser.finish()
        assert plain(message_of(events)) == plain(message) and events[-1] == End(len(message.calls), whole=True)


def test_a_marker_that_is_spelled_is_text_where_tokens_come():
    """Values that spell the format's tags do not end what they stand in, though as characters they would."""
    tokenizer = released_tokenizer()
    for message, _, _, thinking in answers(markers=True)[:80]:
        effort = "high" if thinking else "none"
        size = len(encode([Message("user", "u")], tokenizer, effort).ids)
        parser = TokenParser(tokenizer, thinking)
        ids = encode([Message("user", "u"), message], tokenizer, effort).ids[size:].tolist()
        events = [event for id in ids for event in parser.push(id)] + parser.finish()
        assert plain(message_of(events)) == plain(message)


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("r</think>a" + END + "more", [Reasoning("r"), Content("a"), End(0, True)]),
        ("r", [Reasoning("r"), End(0, False)]),
        (f"r{OPEN}{CLOSE}</think>", [Reasoning(f"r{OPEN}{CLOSE}"), End(0, True)]),
        ("</think></think>", [Content("</think>"), End(0, True)]),
        ("</think>\n\n\n\n", [Content("\n\n\n\n"), End(0, True)]),
    ],
)
def test_reasoning_ends_at_its_marker_alone(text: str, events: list[Event]):
    assert parsed(text, thinking=True) == events


CALL = [CallStart(0, "f"), CallArguments(0, "{}"), CallEnd(0)]


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (f"c{OPEN}{CLOSE}", [Content("c"), *CALL, End(1, True)]),
        (f"c\n{OPEN}{CLOSE}\n", [Content("c\n"), *CALL, Content("\n"), End(1, True)]),
        (OPEN.strip() + CLOSE.replace("\n", ""), [*CALL, End(1, True)]),
        (OPEN + CLOSE + OPEN + CLOSE, [*CALL, CallStart(1, "f"), CallArguments(1, "{}"), CallEnd(1), End(2, True)]),
        (f"\n\n{BLOCK}\n</｜DSML｜tool_calls>", [Content(f"\n\n{BLOCK}\n</｜DSML｜tool_calls>"), End(0, True)]),
        (f'{BLOCK}{INVOKE}f\n">', [Content(f'{BLOCK}{INVOKE}f\n">'), End(0, True)]),
        (f"{BLOCK}{INVOKE}f{END}", [Content(f"{BLOCK}{INVOKE}f"), End(0, True)]),
        (f"{OPEN}junk {CLOSE}", [CallStart(0, "f"), Content("junk \n"), *CALL[1:], End(1, True)]),
        (f"{OPEN}{STRING}x", [CallStart(0, "f"), CallArguments(0, '{"a": "x'), End(0, False)]),
        (f"{OPEN}{STRING}x{END}", [CallStart(0, "f"), CallArguments(0, '{"a": "x'), End(0, False)]),
        (f"{OPEN}{JSON}no{SHUT}{CLOSE}", [CallStart(0, "f"), CallArguments(0, '{"b": no}'), CallEnd(0), End(1, True)]),
        (
            f'{OPEN}<｜DSML｜parameter name="a">b" string="true">x{SHUT}{CLOSE}',
            [
                CallStart(0, "f"),
                Content(f'<｜DSML｜parameter name="a">b" string="true">x{SHUT}\n'),
                *CALL[1:],
                End(1, True),
            ],
        ),
        (f"{OPEN}{CLOSE[:-4]}", [*CALL, Content("</｜DSML｜tool_ca"), End(1, False)]),
    ],
)
def test_malformed_calls_come_out_as_content_or_stay_open(text: str, events: list[Event]):
    assert parsed(text) == events == parsed(text, cuts=tuple(range(len(text))))


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        (f"{STRING}1{SHUT}{STRING}2{SHUT}", '{"a": "1", "a": "2"}'),
        (f'{JSON}"\\ud800"{SHUT}', '{"b": "\\ud800"}'),
        (f'{JSON}{{"c": 1, "c": 2}}{SHUT}', '{"b": {"c": 1, "c": 2}}'),
    ],
)
def test_arguments_that_would_lose_something_are_written_as_one_string(parameters: str, arguments: str):
    message = message_of(parsed(f"{OPEN}{parameters}{CLOSE}"))
    assert message.calls == (ToolCall("f", arguments),)
    written = text_of(render([Message("user", "u"), message], "none"))
    assert f'<｜DSML｜parameter name="arguments" string="true">{arguments}{SHUT}' in written
    assert written.count("parameter name=") == 1
    assert encode([Message("user", "u"), message], chat_tokenizer(), "none").ids.size


def test_a_call_that_did_not_end_is_no_call():
    assert message_of(parsed(f"c{OPEN}{STRING}x")) == Message("assistant", "c")
    assert message_of(parsed(f"c{OPEN}{STRING}x{SHUT}{CLOSE}")).calls == (ToolCall("f", '{"a": "x"}'),)


def test_only_what_may_become_a_tag_is_held_back():
    """What each character releases, in content, in a value and in reasoning."""
    content = ChatParser(thinking=False)
    released = [content.push(each) for each in "a\nb<c</d<｜DSML｜t!\n\n\n"]
    texts = ["".join(event.text for event in events if isinstance(event, Content)) for events in released]
    assert texts == ["a", "", "\nb", "", "<c", "", "</", "d", *[""] * 8, "<｜DSML｜t!", "", "", "\n"]
    value = ChatParser(thinking=False)
    value.push(OPEN + STRING)
    assert [value.push(each) for each in '"\n</x'] == [
        [CallArguments(0, '\\"')], [CallArguments(0, "\\n")], [], [], [CallArguments(0, "</x")],
    ]  # fmt: skip
    reasoning = ChatParser(thinking=True)
    events = [reasoning.push(each) for each in "\n\n</｜"]
    assert events == [[Reasoning("\n")], [Reasoning("\n")], [], [], [Reasoning("</｜")]]


@pytest.mark.parametrize("size", [1024, 1025])
def test_a_name_is_held_back_for_a_thousand_characters_at_most(size: int):
    parser = ChatParser(thinking=False)
    released = [event for each in OPEN.strip().removesuffix('f">') + "x" * size + '">' for event in parser.push(each)]
    assert isinstance(released[0], CallStart if size == 1024 else Content)


def test_arguments_come_as_they_are_written():
    parser = ChatParser(thinking=False)
    parts = [OPEN, STRING, "Not ", 'to "be"', SHUT, "\n" + JSON, "[1,", " 2]", SHUT, CLOSE]
    pushed = [[event.text for event in parser.push(part) if isinstance(event, CallArguments)] for part in parts]
    assert pushed == [
        [], ['{"a": "'], ["Not "], ['to \\"be\\"'], ['"'], [', "b": '], ["[1,"], [" 2]"], [], ["}"],
    ]  # fmt: skip


def test_tokens_without_meaning_are_text():
    tokenizer = chat_tokenizer()
    parser = TokenParser(tokenizer, thinking=True)
    half = text_ids("é")[:1]  # of a character
    ids = [*text_ids("r</think>"), *half, ANSWER_ID, 0, 10**6, ANSWER_ID, *half]
    events = joined([event for id in ids for event in parser.push(id)] + parser.finish())
    wanted = "<｜begin▁of▁sentence｜>\ufffd</think>\ufffd"
    assert events == [Reasoning("r</think>\ufffd"), Content(wanted), End(0, True)]


def test_any_tokens_at_all_are_parsed():
    tokenizer, draw = released_tokenizer(), random.Random(0)
    awkward = [id for id in tokenizer.encode(OPEN + STRING + "a" + SHUT + CLOSE + "</think>", specials=True)]
    for _ in range(200):
        ids = [draw.choice(awkward) if draw.random() < 0.8 else draw.randrange(129_300) for _ in range(40)]
        parser = TokenParser(tokenizer, thinking=draw.random() < 0.5)
        events = [event for id in ids for event in parser.push(id)] + parser.finish()
        assert isinstance(events[-1], End)
