"""Corpora as named documents, one at a time: the shipped plays, text, JSONL and Parquet files, Hugging Face data."""

from __future__ import annotations

import codecs
import importlib.resources
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from undertow.config.errors import InputError
from undertow.data.records import (
    HUB,
    RECORD_FILES,
    Reading,
    Record,
    corpus_files,
    file_records,
    hub_records,
    told_missing,
)

SHIPPED = {"plays": "plays.jsonl.xz"}
TEXT_FILES = (".txt", *RECORD_FILES)
_PIECE = 1 << 20  # bytes read at once


@dataclass(frozen=True)
class Document:
    """One text that is learned as a unit, and the name it is reported by; not `named`, that is its place in a file."""

    name: str
    text: str
    named: bool = field(default=True, compare=False)

    @property
    def content(self) -> str:
        """What decides whether it is held out: its text and its own name, wherever it stands."""
        return f"{self.name if self.named else ''}\n{self.text}"


def load_corpus(corpus: str | Path, text_field: str = "text", split: str = "train") -> list[Document]:
    """All documents of `read_documents`."""
    return list(read_documents(corpus, text_field, split))


def read_documents(
    corpus: str | Path, text_field: str = "text", split: str = "train", reading: Reading | None = None
) -> Iterator[Document]:
    """The documents of a corpus in order, streamed; `reading` follows how far it is.

    `corpus` is a shipped one by name (`plays`), a file, a directory of files, taken by name, or `hf:NAME[:CONFIG]` of
    Hugging Face. A `.txt` file holds one document, or several with a form feed (U+000C) between them. A record (a line
    of `.jsonl`, a row of `.parquet`) holds its text in `text_field` and, if wanted, a `name`. All text is UTF-8, and
    an empty one is no document. Raises `InputError` for what is missing or malformed, naming the byte, line or row, and
    for a corpus without a document.
    """
    corpus, reading = str(corpus), reading or Reading()
    found = False
    for document in _documents(corpus, text_field, split, reading):
        if document.text:
            found = True
            yield document
    if not found:
        raise InputError(f"corpus '{corpus}' is empty: it needs at least one document with text")


def _documents(corpus: str, text_field: str, split: str, reading: Reading) -> Iterator[Document]:
    fields, needed = (text_field, "name"), (text_field,)
    if corpus in SHIPPED:
        yield from _shipped(corpus, reading)
    elif corpus.startswith(HUB):
        for record in hub_records(corpus, fields, needed, split, reading):
            yield _document(record, text_field)
    else:
        for path in corpus_files(corpus, TEXT_FILES, reading):
            if path.suffix == ".txt":
                yield from _text_documents(path, reading)
            else:
                for record in file_records(path, fields, needed, reading):
                    yield _document(record, text_field)


def _shipped(corpus: str, reading: Reading) -> Iterator[Document]:
    packed = (importlib.resources.files("undertow.data") / "assets" / SHIPPED[corpus]).read_bytes()
    lines = lzma.decompress(packed).decode("utf-8").split("\n")
    reading.total = len(lines)
    for number, line in enumerate(lines, 1):
        reading.done += 1
        if line:
            yield _document(Record(json.loads(line), f"line {number}", f"corpus '{corpus}', line {number}"), "text")


def _document(record: Record, text_field: str) -> Document:
    values, where = record.values, record.where
    if not isinstance(values, dict):
        raise InputError(f'{where}: expected an object with a string "{text_field}", as in {{"{text_field}": "To be"}}')
    if text_field not in values:
        raise InputError(f"{where}: {told_missing(text_field, list(values))}")
    text = values[text_field]
    if not isinstance(text, str):
        told = "null" if text is None else f"a {type(text).__name__}"
        raise InputError(f"{where}: the field {text_field!r} must be a string, it is {told}")
    given = values.get("name")
    name = record.place if given is None else given
    if not isinstance(name, str):
        raise InputError(f'{where}: "name" must be a string, not {name!r}')
    check_unicode(name + text, where)
    return Document(name, text, named=given is not None)


def check_unicode(text: str, where: str) -> None:
    """Raises `InputError` for a text with half a surrogate pair, which UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: the text holds half a surrogate pair ({error.object[error.start]!r})") from None


def _text_documents(path: Path, reading: Reading) -> Iterator[Document]:
    parts = (part for part in _divided(path, reading) if part.strip())
    first, second = next(parts, None), next(parts, None)
    if first is not None and second is None:
        yield Document(path.name, first, named=False)
    elif first is not None and second is not None:
        yield Document(f"{path.name}, part 1", first, named=False)
        yield Document(f"{path.name}, part 2", second, named=False)
        for number, part in enumerate(parts, 3):
            yield Document(f"{path.name}, part {number}", part, named=False)


def _divided(path: Path, reading: Reading) -> Iterator[str]:
    """The text of a file between form feeds; never more of it in memory than a document and a piece."""
    held: list[str] = []
    for piece in _decoded(path, reading):
        head, *rest = piece.split("\f")
        held.append(head)
        for part in rest:
            yield "".join(held)
            held = [part]
    yield "".join(held)


def _decoded(path: Path, reading: Reading) -> Iterator[str]:
    decoder, read, first = codecs.getincrementaldecoder("utf-8")(), 0, True
    with path.open("rb") as file:
        while True:
            data = file.read(_PIECE)
            pending = len(decoder.getstate()[0])
            try:
                piece = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                at = read - pending + error.start
                raise InputError(
                    f"corpus '{path}' is not UTF-8: byte {at} is 0x{error.object[error.start]:02x}; "
                    "convert the file to UTF-8"
                ) from None
            read += len(data)
            reading.done += len(data)
            yield piece.removeprefix("\ufeff") if first else piece
            first = first and not piece
            if not data:
                return
