"""Byte-level BPE: text to ids and back, byte counts, and streaming that never shows half a character."""

from __future__ import annotations

import codecs
import importlib.resources
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from undertow.config.errors import InputError

# The released model's names; the shipped tokenizers give them ids 0, 1 and 2 as the release does.
BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"

SHIPPED = ("bpe-2048", "bpe-4096")


class Tokenizer:
    """A byte-level BPE with begin- and end-of-document tokens; any text survives encoding and decoding unchanged.

    Made by `load`, `from_name` (shipped with the package) or `from_directory` (any model directory with a byte-level
    `tokenizer.json`, DeepSeek's included). `bos_id` and `eos_id` are never added by `encode`.
    """

    def __init__(self, definition: str, bos: str = BOS, eos: str = EOS, source: str = "tokenizer") -> None:
        """`definition` is the text of a `tokenizer.json`; raises `InputError` if it is not a byte-level tokenizer."""
        self._definition = definition
        self._plain = _parse(definition, source)
        self._plain.encode_special_tokens = True  # special tokens' names are ordinary text
        self.bos_token, self.eos_token = bos, eos
        self.bos_id, self.eos_id = (_special_id(self._plain, token, source) for token in (bos, eos))
        self._bytes = {id: _token_bytes(token) for token, id in self._plain.get_vocab(with_added_tokens=True).items()}
        self.vocab_size = max(self._bytes) + 1
        added = self._plain.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self._added = {token.content: id for id, token in added.items()}

    @classmethod
    def load(cls, name: str) -> Tokenizer:
        """A shipped tokenizer by name, the `tokenizer.json` of a directory, or such a file itself."""
        if name in SHIPPED:
            return cls.from_name(name)
        if os.path.isfile(name):  # unlike Path.is_file false for a name that is too long
            return cls._from_file(Path(name))
        if not os.path.isdir(name):
            raise InputError(
                f"tokenizer '{name}' is neither shipped ({', '.join(SHIPPED)}), nor a directory with a tokenizer.json, "
                "nor such a file"
            )
        return cls.from_directory(name)

    @classmethod
    def from_name(cls, name: str) -> Tokenizer:
        """A shipped tokenizer: `bpe-2048` or `bpe-4096`, by its number of entries, learned from the shipped plays."""
        if name not in SHIPPED:
            raise InputError(f"unknown tokenizer '{name}' (shipped: {', '.join(SHIPPED)})")
        asset = importlib.resources.files("undertow.data") / "assets" / f"{name}.json"
        return cls(asset.read_text(encoding="utf-8"), source=name)

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """The `tokenizer.json` of a model directory.

        `tokenizer_config.json`, where there is one, names the begin and end tokens; otherwise the released names hold.
        """
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"'{directory}' holds no tokenizer.json")
        return cls._from_file(path)

    @classmethod
    def _from_file(cls, path: Path) -> Tokenizer:
        settings = path.with_name("tokenizer_config.json")
        names = _read_json(settings) if settings.is_file() else {}
        bos, eos = (_token_name(names.get(key), default) for key, default in (("bos_token", BOS), ("eos_token", EOS)))
        return cls(_read_text(path), bos, eos, str(path))

    def save(self, directory: str | Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, which transformers' `AutoTokenizer` also reads."""
        settings = dict(
            tokenizer_class="PreTrainedTokenizerFast",
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            pad_token=self.eos_token,  # as in the release; padding is a mask, never this id
            clean_up_tokenization_spaces=False,
        )
        Path(directory).mkdir(parents=True, exist_ok=True)
        _write(Path(directory) / "tokenizer.json", self._definition)
        _write(Path(directory) / "tokenizer_config.json", json.dumps(settings, indent=2, ensure_ascii=False) + "\n")

    def encode(self, text: str, specials: bool = False) -> list[int]:
        """The ids of `text`. Special tokens' names in it are ordinary text unless `specials`: text cannot forge them.

        Added tokens that the definition does not mark special (DeepSeek's `<｜User｜>`) are recognised either way.
        """
        if not _is_unicode(text):
            raise InputError(f"text {text[:40]!r} is not Unicode: it holds half a surrogate pair")
        return (self._parsing if specials else self._plain).encode(text, add_special_tokens=False).ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, special names taken as ordinary text, on all cores."""
        return _encode_all(self._plain, texts)

    def encode_literally(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_all`, but no added token is recognised at all: text cannot forge the markers of a chat either."""
        return _encode_all(self._literal, texts)

    def added_id(self, token: str) -> int | None:
        """The id of an added token, special or not (DeepSeek's `<｜User｜>`); None where the definition has none."""
        return self._added.get(token)

    @cached_property
    def identity(self) -> str:
        """A digest of the definition and the begin and end tokens; white space in the file does not matter."""
        canonical = json.dumps([json.loads(self._definition), self.bos_token, self.eos_token], sort_keys=True)
        return blake2b(canonical.encode(), digest_size=16).hexdigest()

    def decode(self, ids: Iterable[int], specials: bool = False) -> str:
        """The text of `ids`, special tokens left out unless `specials`; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(id, specials) for id in ids).decode("utf-8", errors="replace")

    def token_bytes(self, id: int, specials: bool = False) -> bytes:
        """The bytes of one token, none for a special one unless `specials`. Raises `InputError` for an unknown id."""
        id = int(id)  # an element of a tensor would not be found among the special ids
        if id not in self._bytes:
            raise InputError(f"token id {id} is not in the vocabulary of {self.vocab_size}")
        return b"" if id in self.special_ids and not specials else self._bytes[id]

    def bytes_of(self, ids: np.ndarray | Iterable[int]) -> int:
        """UTF-8 bytes of text that `ids` stand for. Special tokens and the label -100 count nothing.

        Nats per byte of a model is the sum of its losses over all labels (the end token's included) divided by
        `bytes_of(labels)`: the cost of all that was predicted over the text that was predicted.
        """
        flat = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64).ravel()
        flat = flat[flat != -100]
        if flat.size and not 0 <= flat.min() <= flat.max() < self.vocab_size:
            raise InputError(f"token ids {flat.min()} to {flat.max()} are outside the vocabulary of {self.vocab_size}")
        return int(self._lengths[flat].sum())

    @cached_property
    def _lengths(self) -> np.ndarray:
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for id in self._bytes:
            lengths[id] = len(self.token_bytes(id))
        return lengths

    @cached_property
    def _parsing(self) -> tokenizers.Tokenizer:
        # A second instance: the switch is a property of the object, and flipping it per call would race among threads.
        return _parse(self._definition, "tokenizer")

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        return _parse(json.dumps(json.loads(self._definition) | {"added_tokens": []}), "tokenizer")


class StreamDecoder:
    """Decodes one sequence id by id. All pushes and the flush, joined, equal `Tokenizer.decode` of all ids.

    A push costs the token's own bytes, however long the sequence is.
    """

    def __init__(self, tokenizer: Tokenizer, specials: bool = False) -> None:
        self._tokenizer, self._specials = tokenizer, specials
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        """The text that `id` completes; empty while the last character still lacks bytes."""
        return self._decoder.decode(self._tokenizer.token_bytes(id, self._specials))

    def flush(self) -> str:
        """What an unfinished character at the end decodes to: U+FFFD or nothing. The decoder is then as new."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def _encode_all(encoder: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    for number, text in enumerate(texts):
        if not _is_unicode(text):
            raise InputError(f"text {number} is not Unicode: it holds half a surrogate pair")
    return [encoding.ids for encoding in encoder.encode_batch_fast(list(texts), add_special_tokens=False)]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _byte_alphabet() -> dict[str, int]:
    # Byte-level BPE writes printable Latin-1 bytes as themselves and the 68 others as U+0100 onwards, in order.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    if all(character in _ALPHABET for character in token):
        return bytes(_ALPHABET[character] for character in token)
    return token.encode()  # an added token, written as plain text


def _parse(definition: str, source: str) -> tokenizers.Tokenizer:
    try:
        parsed = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"{source} is not a tokenizer definition: {error}") from None
    parsed.no_truncation()  # a definition may carry the limits of another program
    parsed.no_padding()
    if not isinstance(parsed.decoder, tokenizers.decoders.ByteLevel):
        raise InputError(f"{source} is not a byte-level tokenizer: its decoder must be ByteLevel, not {parsed.decoder}")
    return parsed


def _special_id(parsed: tokenizers.Tokenizer, token: str, source: str) -> int:
    id = parsed.token_to_id(token)
    if id is None:
        raise InputError(f"{source} has no token '{token}'; name its begin and end tokens in tokenizer_config.json")
    return id


def _token_name(value: Any, default: str) -> str:
    # transformers writes either the text or an object that holds it as `content`.
    name = value.get("content") if isinstance(value, dict) else value
    return name if isinstance(name, str) else default


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 at byte {error.start}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold a JSON object")
    return value


def _write(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp gives the owner alone access
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
