"""Headers of safetensors files, read without trust."""

from __future__ import annotations

import os
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from undertow.checkpoint.header import DTYPES, open_regular, read_header, size_of
from undertow.config.errors import InputError


def test_spans_of_every_type(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(4, 6, dtype=torch.uint8).repeat(1, 8).view(dtype) for name, dtype in DTYPES.items()}
    save_file(tensors, tmp_path / "a")
    spans = read_header(tmp_path / "a")
    data = (tmp_path / "a").read_bytes()
    with safe_open(tmp_path / "a", framework="pt") as theirs:
        for name, tensor in tensors.items():
            span = spans[name]
            assert span.dtype == name and list(span.shape) == theirs.get_slice(name).get_shape()
            assert data[span.begin : span.end] == tensor.view(torch.uint8).numpy().tobytes()
            assert size_of(span.dtype, span.shape) == span.end - span.begin == tensor.nbytes


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_in_one_line(data: bytes) -> None:
    for head in (b"", struct.pack("<Q", max(len(data), 2))):
        with tempfile.NamedTemporaryFile() as file:
            file.write(head + data)
            file.flush()
            try:
                read_header(Path(file.name))
            except InputError as error:
                assert "\n" not in str(error)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, why in (
        ("pipe", "a pipe or a device"),
        ("loop", "Too many levels"),
        ("", "Is a directory"),
        ("no", "No"),
    ):
        with pytest.raises(InputError, match=why):
            open_regular(tmp_path / name)
