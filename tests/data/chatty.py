"""A byte tokenizer that has DeepSeek's chat markers, as added tokens of which the definition calls none special."""

from __future__ import annotations

import json
from functools import cache

from tests.engine.bytelevel import FIRST_BYTE
from tests.engine.bytelevel import tokenizer as plain
from undertow.data.chat import ANSWER, ASSISTANT, USER
from undertow.data.tokenizer import Tokenizer

USER_ID, ASSISTANT_ID, THINK_ID, ANSWER_ID = 300, 301, 302, 303


@cache
def chat_tokenizer() -> Tokenizer:
    """Ids: those of `tests.engine.bytelevel`, then the markers from 300 on."""
    definition = json.loads(plain()._definition)
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=True, special=False)
    for id, content in enumerate((USER, ASSISTANT, "<think>", ANSWER), USER_ID):
        # In the vocabulary, too: the library would else number added tokens on from it.
        definition["model"]["vocab"][content] = id
        definition["added_tokens"].append({"id": id, "content": content, **flags})
    return Tokenizer(json.dumps(definition))


def text_ids(text: str) -> list[int]:
    """Ids of a text's bytes."""
    return [FIRST_BYTE + byte for byte in text.encode()]
