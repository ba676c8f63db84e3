"""The manifest of a directory of prepared shards: what was prepared, how, and the size and digest of every file."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from undertow.config.errors import InputError
from undertow.data.tokenizer import Tokenizer

MANIFEST, TOKENIZER, HELD_OUT = "manifest.json", "tokenizer", "held-out"
FORMAT, VERSION = "undertow shards", 1
PIECE, PIECES = 1 << 16, 16  # a sample: so many bytes at so many places of a file

Count = Annotated[int, Field(ge=0, lt=2**63)]
Some = Annotated[int, Field(ge=1, lt=2**63)]


class _Facts(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class FileFacts(_Facts):
    """Bytes of a file, the digest of all of it, and that of a sample: 64 KiB at 16 places, both ends among them."""

    bytes: Count
    digest: str
    sample: str

    @classmethod
    def of(cls, path: Path) -> FileFacts:
        """Those of a file on disk."""
        return cls(bytes=path.stat().st_size, digest=file_digest(path), sample=file_digest(path, sample=True))


class ShardFacts(_Facts):
    """One shard: its documents and tokens, and its files. `learned` is there for kind chat."""

    name: str = Field(pattern=r"^shard-[0-9]{5,}$")
    documents: Some
    tokens: Some
    files: dict[Literal["tokens", "offsets", "learned"], FileFacts]


class TokenizerFacts(_Facts):
    """The tokenizer: its identity (a digest of its definition), entries, and begin and end tokens."""

    identity: str
    vocab_size: Count
    bos_id: Count
    eos_id: Count

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenizerFacts:
        """Those of a tokenizer."""
        facts = {name: getattr(tokenizer, name) for name in cls.model_fields}
        return cls(**facts)


class Side(_Facts):
    """One side of the division: documents, tokens, and bytes of UTF-8 text."""

    documents: Count
    tokens: Count
    bytes: Count


class Manifest(_Facts):
    """All there is to know of prepared shards. `held_out` lists the numbers of the held-out documents, int64."""

    format: Literal["undertow shards"] = FORMAT
    version: Literal[1] = VERSION
    kind: Literal["text", "chat"]
    corpus: str
    tokenizer: TokenizerFacts
    dtype: Literal["uint16", "uint32"]
    validation_fraction: float
    training: Side
    validation: Side
    held_out: FileFacts
    shards: Annotated[list[ShardFacts], Field(min_length=1)]

    @property
    def token_dtype(self) -> np.dtype:
        """Of the token files, little-endian."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def content(self) -> str:
        """A digest over those of all files: it changes with any token, mask or division, and with nothing else."""
        files = [facts.digest for shard in self.shards for _, facts in sorted(shard.files.items())]
        return blake2b("\n".join([*files, self.held_out.digest]).encode(), digest_size=16).hexdigest()

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest in `directory`. Raises `InputError` for one that is damaged or of another version."""
        path = directory / MANIFEST
        try:
            values: Any = json.loads(path.read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: not JSON ({error}); prepare the shards again") from None
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise InputError(f"{path}: is no manifest of prepared shards (its format is not '{FORMAT}')")
        if type(values.get("version")) is not int or values["version"] != VERSION:
            raise InputError(
                f"{path}: shards of version {values.get('version')!r}, {VERSION} is read here; prepare them again"
            )
        try:
            return cls.model_validate_json(json.dumps(values))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise InputError(
                f"{path}: {key}: {first['msg']}; the manifest is damaged, prepare the shards again"
            ) from None

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps(self.model_dump(), indent=1, ensure_ascii=False) + "\n"


def file_digest(path: Path, sample: bool = False) -> str:
    """BLAKE2b of a file's bytes, or of the pieces of it that a sample takes."""
    digest, size = blake2b(digest_size=16), path.stat().st_size
    with path.open("rb") as file:
        if sample:
            for piece in range(PIECES):
                file.seek(max(size - PIECE, 0) * piece // (PIECES - 1))
                digest.update(file.read(PIECE))
        else:
            while data := file.read(1 << 22):
                digest.update(data)
    return digest.hexdigest()
