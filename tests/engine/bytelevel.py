"""A tokenizer small enough for the debug model: one token a byte, a few longer ones, begin and end of sequence."""

from __future__ import annotations

import json
from functools import cache

from undertow.data.tokenizer import BOS, EOS, Tokenizer

LONGER = ("to", "be", "toto", "or not", "END", "!?")
FIRST_BYTE = 2
VOCABULARY = FIRST_BYTE + 256 + len(LONGER)


def _spelling() -> list[str]:
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    return [chr(b) if b in shown else chr(0x100 + hidden.index(b)) for b in range(256)]


@cache
def tokenizer() -> Tokenizer:
    """Ids: 0 and 1 are begin and end, 2 + b is byte b, then `LONGER` (never made by `encode`: there are no merges)."""
    spelling = _spelling()
    words = [BOS, EOS, *spelling, *("".join(spelling[b] for b in word.encode()) for word in LONGER)]
    special = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    return Tokenizer(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [{"id": i, "content": text, **special} for i, text in enumerate((BOS, EOS))],
                "pre_tokenizer": {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": False,
                },
                "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
                "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)}, "merges": []},
            }
        )
    )


def ids_of(*words: str | int) -> list[int]:
    """Ids of whole words of `LONGER`, of the bytes of other texts, or of numbers as they are."""
    ids: list[int] = []
    for word in words:
        if isinstance(word, int):
            ids.append(word)
        elif word in LONGER:
            ids.append(FIRST_BYTE + 256 + LONGER.index(word))
        else:
            ids.extend(FIRST_BYTE + b for b in word.encode())
    return ids
