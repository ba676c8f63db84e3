"""A run that takes a second: a three-layer debug model, byte tokens, a few lines of text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.bytelevel import VOCABULARY, tokenizer
from undertow.config.resolve import Resolved, resolve

LINES = ("to be or not to be", "all that glisters is not gold", "the rest is silence", "now is the winter")


@pytest.fixture(scope="package")
def text(tmp_path_factory) -> Path:
    """A directory with `corpus.jsonl` and a tokenizer."""
    path = tmp_path_factory.mktemp("text")
    tokenizer().save(path)
    texts = [f"{line}, {line}; " * 2 for line in LINES * 4]
    lines = [json.dumps({"name": str(i), "text": t}) + "\n" for i, t in enumerate(texts)]
    (path / "corpus.jsonl").write_text("".join(lines), "utf-8")
    return path


@pytest.fixture(scope="package")
def recipe(text: Path) -> Callable[..., Resolved]:
    """`recipe(DIR, "train.steps=2", ...)`: a resolved run in that directory."""

    def _recipe(out: Path, *overrides: str) -> Resolved:
        base = (
            *("model=v4-debug", f"model.vocab_size={VOCABULARY}", "device=cpu", f'out="{out}"'),
            *("model.num_hidden_layers=3", "model.compress_ratios=[0,4,8,0]", "train.warmup_steps=2"),
            *(f'data.corpus="{text / "corpus.jsonl"}"', f'data.tokenizer="{text}"', "data.validation_fraction=0.2"),
            *("train.steps=4", "train.batch_size=2", "train.sequence_length=48", "train.log_every=2"),
            *("train.eval_every=2", "train.eval_sequences=1", "train.checkpoint_every=2"),
        )
        return resolve(None, [*base, *overrides], {})

    return _recipe
