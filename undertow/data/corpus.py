"""Corpora as lists of named documents: the shipped plays, a text file or a JSONL file, and their held-out split."""

from __future__ import annotations

import importlib.resources
import json
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from undertow.config.errors import InputError

SHIPPED = {"plays": "plays.jsonl.xz"}


@dataclass(frozen=True)
class Document:
    """One text that is learned as a unit, and the name it is reported by."""

    name: str
    text: str


def load_corpus(source: str | Path) -> list[Document]:
    """The documents of `source`, in file order: a shipped corpus by name (`plays`) or a path.

    A `.txt` file holds one document, or several with a form feed (U+000C) between them. A `.jsonl` file holds one
    object a line with a `text` and, if wanted, a `name`. Both are UTF-8. Raises `InputError` for a missing, empty or
    malformed file, naming the byte or the line.
    """
    if str(source) in SHIPPED:
        asset = SHIPPED[str(source)]
        packed = (importlib.resources.files("undertow.data") / "assets" / asset).read_bytes()
        return _from_jsonl(lzma.decompress(packed).decode("utf-8"), str(source))
    path = Path(source)
    if path.suffix not in (".txt", ".jsonl"):
        raise InputError(
            f"corpus '{source}' is neither shipped ({', '.join(SHIPPED)}) nor a path ending in .txt or .jsonl"
        )
    if not path.is_file():
        raise InputError(f"corpus '{source}': there is no such file")
    text = _decode(path.read_bytes(), path)
    documents = _from_jsonl(text, str(path)) if path.suffix == ".jsonl" else _from_text(text, path)
    if not documents:
        raise InputError(f"corpus '{source}' is empty: it needs at least one document with text")
    return documents


def split(
    documents: Sequence[Document], validation_fraction: float = 0.02, seed: int = 0
) -> tuple[list[Document], list[Document]]:
    """(training, validation): whole documents, disjoint, each part in corpus order and never empty.

    Documents are drawn in an order fixed by `seed` and their content until they hold `validation_fraction` of the
    bytes. A corpus of one document is cut in two at a line break instead. The shipped tokenizers learned from the
    training part under the default arguments. Raises `InputError` if the fraction is not in (0, 1) or there is nothing
    to divide.
    """
    if not 0 < validation_fraction < 1:
        raise InputError(f"validation_fraction {validation_fraction} must lie between 0 and 1, both excluded")
    if len(documents) == 1:
        return _cut(documents[0], validation_fraction)
    if not documents:
        raise InputError("a corpus of no documents cannot be divided into training and validation")
    sizes = [len(document.text.encode()) for document in documents]
    drawn = sorted(range(len(documents)), key=lambda index: (_digest(documents[index], seed), index))
    wanted = validation_fraction * sum(sizes)
    held_out: set[int] = set()
    held_bytes = 0
    for index in drawn[:-1]:  # the last one always stays in training
        held_out.add(index)
        held_bytes += sizes[index]
        if held_bytes >= wanted:
            break
    training = [document for index, document in enumerate(documents) if index not in held_out]
    validation = [document for index, document in enumerate(documents) if index in held_out]
    return training, validation


def _cut(document: Document, validation_fraction: float) -> tuple[list[Document], list[Document]]:
    text = document.text
    if len(text) < 2:
        raise InputError(f"document '{document.name}' of one character cannot be divided into training and validation")
    target = min(max(round(len(text) * (1 - validation_fraction)), 1), len(text) - 1)
    # The line break may lie far off, or nowhere: then the cut falls inside a line.
    at = text.rfind("\n", 0, target) + 1
    at = at if at > target // 2 else target
    return [Document(f"{document.name} (start)", text[:at])], [Document(f"{document.name} (end)", text[at:])]


def _digest(document: Document, seed: int) -> bytes:
    return blake2b(f"{seed}\n{document.name}\n{document.text}".encode(), digest_size=16).digest()


def _decode(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InputError(
            f"corpus '{path}' is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}; convert the file to UTF-8"
        ) from None


def _from_text(text: str, path: Path) -> list[Document]:
    parts = [part for part in text.split("\f") if part.strip()]
    if len(parts) == 1:
        return [Document(path.name, parts[0])]
    return [Document(f"{path.name}, part {number}", part) for number, part in enumerate(parts, 1)]


def _from_jsonl(text: str, source: str) -> list[Document]:
    # Not splitlines(): a JSON string may hold U+2028 and its like unescaped.
    lines = enumerate(text.split("\n"), 1)
    return [_from_line(line, f"corpus '{source}', line {number}", number) for number, line in lines if line.strip()]


def _from_line(line: str, where: str, number: int) -> Document:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON at column {error.colno} ({error.msg})") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str) or not entry["text"]:
        raise InputError(f'{where}: expected an object with a non-empty string "text", as in {{"text": "To be"}}')
    name = entry.get("name", f"line {number}")
    if not isinstance(name, str):
        raise InputError(f'{where}: "name" must be a string, not {json.dumps(name)}')
    try:
        (name + entry["text"]).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: the text holds half a surrogate pair ({error.object[error.start]!r})") from None
    return Document(name, entry["text"])
