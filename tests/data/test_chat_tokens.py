"""Conversations as token ids: markers by their ids, and texts that cannot forge one."""

import json
from itertools import pairwise

import pytest

from tests.data.chatty import ANSWER_ID, ASSISTANT_ID, THINK_ID, USER_ID, chat_tokenizer, text_ids
from tests.data.dsv4 import released_tokenizer
from tests.data.talks import Talk
from undertow.data.chat import MARKERS, Message, encode, encode_pieces, marker_ids, read_messages, render, text_of
from undertow.data.tokenizer import Tokenizer

# Of the released tokenizer, as its model card lists them.
IDS = {
    "<｜begin▁of▁sentence｜>": 0, "<｜end▁of▁sentence｜>": 1, "<｜User｜>": 128803, "<｜Assistant｜>": 128804,
    "<think>": 128821, "</think>": 128822, "｜DSML｜": 128825, "<｜latest_reminder｜>": 128828, "<｜action｜>": 128829,
    "<｜query｜>": 128830, "<｜authority｜>": 128831, "<｜domain｜>": 128832, "<｜title｜>": 128836,
    "<｜read_url｜>": 128845,
}  # fmt: skip


def test_the_released_tokenizer_has_every_marker():
    assert marker_ids(released_tokenizer()) == IDS and set(IDS) == set(MARKERS)


def test_markers_that_a_tokenizer_lacks_are_not_listed():
    begin, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    assert marker_ids(Tokenizer.from_name("bpe-2048")) == {begin: 0, end: 1}
    known = {"<｜User｜>": USER_ID, "<｜Assistant｜>": ASSISTANT_ID, "<think>": THINK_ID, "</think>": ANSWER_ID}
    assert marker_ids(chat_tokenizer()) == {begin: 0, end: 1, **known}


@pytest.mark.parametrize("effort", ["none", "high", "max"])
def test_ids_are_those_of_the_whole_text_where_no_text_spells_a_marker(effort):
    tokenizer, compared = released_tokenizer(), 0
    for seed in range(100):
        pieces = render(read_messages(Talk(seed).messages(), "here"), effort)
        # Only where an assistant follows a system or reminder at once does text meet learned text without a marker.
        if all(a.marker or b.marker or a.learned == b.learned for a, b in pairwise(pieces)):
            (encoded,) = encode_pieces([pieces], tokenizer)
            assert encoded.ids.tolist() == tokenizer.encode(text_of(pieces), specials=True), seed
            compared += 1
    assert compared > 70


@pytest.mark.parametrize("load", [released_tokenizer, chat_tokenizer, lambda: Tokenizer.from_name("bpe-2048")])
def test_no_text_forges_a_marker_and_all_text_survives(load):
    tokenizer = load()
    ids = marker_ids(tokenizer)
    for seed in range(100):
        pieces = render(read_messages(Talk(seed, markers=True).messages(), "here"), "high")
        (encoded,) = encode_pieces([pieces], tokenizer)
        wanted = [ids[piece.text] for piece in pieces if piece.marker and piece.text in ids]
        assert [id for id in encoded.ids.tolist() if id in ids.values()] == wanted
        assert tokenizer.decode(encoded.ids, specials=True) == text_of(pieces)
        learned = "".join(piece.text for piece in pieces if piece.learned)
        assert tokenizer.decode(encoded.ids[encoded.learned], specials=True) == learned


@pytest.mark.parametrize("forged", MARKERS)
def test_a_user_a_tool_and_a_tool_description_cannot_inject(forged: str):
    """The same markers stand in a prompt whether or not what it holds spells more of them."""
    tokenizer = released_tokenizer()

    def markers(text: str) -> list[int]:
        tool = {"type": "function", "function": {"name": "f", "description": text, "parameters": {text: text}}}
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}
        values = [
            {"role": "system", "content": text, "tools": [tool], "response_format": {"a": text}},
            {"role": "user", "content": text},
            {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]},
            {"role": "tool", "content": text, "tool_call_id": "1"},
            {"role": "developer", "content": text},
            {"role": "latest_reminder", "content": text},
            {"role": "user", "content": [{"type": "text", "text": text}]},
        ]
        ids = encode(read_messages(values, "here"), tokenizer, "high").ids.tolist()
        return [id for id in ids if id in IDS.values()]

    assert markers(f"x{forged}y") == markers("xy")


def test_reasoning_and_the_end_of_it_are_learned():
    messages = [Message("user", "u"), Message("assistant", "a", "r")]
    encoded = encode(messages, chat_tokenizer(), "high")
    before = [0, USER_ID, *text_ids("u"), ASSISTANT_ID, THINK_ID]
    after = [*text_ids("r"), ANSWER_ID, *text_ids("a"), 1]
    assert encoded.ids.tolist() == before + after
    assert encoded.learned.tolist() == [False] * len(before) + [True] * len(after)
    assert encoded.ids.dtype == "int32" and encoded.learned.dtype == "bool"


def test_a_prompt_is_the_beginning_of_what_is_learned():
    """What a model samples from is what it was trained after, token by token."""
    tokenizer = released_tokenizer()
    for effort in ("none", "high", "max"):
        messages = [Message("user", "To be?"), Message("assistant", "Not to be.", "Hm" if effort != "none" else "")]
        whole, prompt = encode(messages, tokenizer, effort), encode(messages[:1], tokenizer, effort)
        size = len(prompt.ids)
        assert whole.ids[:size].tolist() == prompt.ids.tolist()
        assert not whole.learned[:size].any() and whole.learned[size:].all()
