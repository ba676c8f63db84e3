"""`undertow data prepare`: a corpus as shards of token ids that a run maps into memory."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from undertow.config.errors import ConfigError, InputError
from undertow.config.scalars import typed

if TYPE_CHECKING:
    from undertow.data.prepare import Preparation

EVERY = 10.0  # seconds between lines where there is no terminal


class Kind(StrEnum):
    """What the corpus consists of."""

    text = "text"
    chat = "chat"


def register(app: typer.Typer) -> None:
    """Attach the verb to the command line."""
    group = typer.Typer(help="Prepare data for training.")
    group.command("prepare")(prepare)
    app.add_typer(group, name="data")


def prepare(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="plays (shipped); a .txt, .jsonl or .parquet file, or a directory of such; hf:NAME[:CONFIG] or "
            "hf:/DIR of Hugging Face.",
        ),
    ],
    target: Annotated[str, typer.Argument(metavar="DST", help="New directory for the shards; data.corpus of a run.")],
    tokenizer: Annotated[
        str, typer.Option(help="Shipped tokenizer (bpe-2048, bpe-4096), directory with tokenizer.json, or such a file.")
    ] = "bpe-2048",
    kind: Annotated[
        Kind, typer.Option(help="text: every token is learned; chat: prompts and responses, responses alone are.")
    ] = Kind.text,
    text_field: Annotated[str, typer.Option(help="Field of a record that holds its text (kind text).")] = "text",
    split: Annotated[str, typer.Option(help="Split of a Hugging Face data set.")] = "train",
    validation_fraction: Annotated[
        float, typer.Option(help="Share of the bytes held out for evaluation, between 0 and 1, in whole documents.")
    ] = 0.05,
    shard_tokens: Annotated[
        int, typer.Option(help="Tokens per shard; it ends with the document that fills it.")
    ] = 100_000_000,
) -> None:
    """Encode a corpus into memory-mapped shards of token ids, with its held-out part and its tokenizer.

    DST appears when all of it is on disk, or not at all.
    """
    if not target:
        raise InputError("DST is empty: name a new directory")
    from undertow.cli.signals import terminable
    from undertow.data.prepare import prepare as prepare_shards
    from undertow.data.tokenizer import Tokenizer

    with terminable(), _progress() as watch:
        manifest = prepare_shards(
            source,
            Path(target),
            Tokenizer.load(tokenizer),
            kind=kind.value,
            text_field=text_field,
            split=split,
            validation_fraction=validation_fraction,
            shard_tokens=shard_tokens,
            watch=watch,
        )
    sides = (("training", manifest.training), ("held out", manifest.validation))
    for name, side in sides:
        print(f"{name}: {side.documents:,} documents, {side.bytes:,} bytes of text, {side.tokens:,} tokens")
    print(f"{len(manifest.shards)} shard(s) of {manifest.dtype} in {target}")
    words = (_word("data.corpus", target), f"data.kind={kind.value}", f"data.validation_fraction={validation_fraction}")
    print(f"train on them: undertow train RECIPE {' '.join(words)}")


def _word(key: str, text: str) -> str:
    """An override as a shell takes it, quoted where YAML would read the text as something else."""
    try:
        plain = typed(text, key) == text
    except ConfigError:
        plain = False
    return shlex.quote(f"{key}={text if plain else json.dumps(text, ensure_ascii=False)}")


@contextmanager
def _progress() -> Iterator[Callable[[Preparation], None]]:
    """Shows how far the work is: a bar on a terminal, a line now and then elsewhere."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console, begun = Console(file=sys.stdout), time.monotonic()
    if not console.is_terminal:
        yield _lines(begun)
        return
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), "left")
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(done: Preparation) -> None:
            reading = done.reading
            bar.update(task, completed=reading.done, total=reading.total or None, description=_told(done, begun))

        yield show


def _lines(begun: float) -> Callable[[Preparation], None]:
    last = begun

    def show(done: Preparation) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < EVERY:
            return
        last = now
        share = done.reading.done / done.reading.total if done.reading.total else 0.0
        left = f", {share:.0%}, {(now - begun) * (1 - share) / share:,.0f} s left" if share else ""
        print(_told(done, begun) + left, flush=True)

    return show


def _told(done: Preparation, begun: float) -> str:
    rate = done.tokens / max(time.monotonic() - begun, 1e-9)
    return f"{done.documents:,} documents, {done.tokens:,} tokens, {rate:,.0f} tokens/s"
