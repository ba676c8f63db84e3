"""Sharded safetensors: sizes, index, laziness, and files that contradict each other."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from undertow.checkpoint.shards import INDEX, Entry, Shards, write_shards
from undertow.config.errors import InputError

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor([1, -2], dtype=torch.int64),
    "c": torch.randn(5, 4, dtype=torch.bfloat16),
    "d": torch.tensor(float("-0.0")),
}


def entry(name: str, tensor: torch.Tensor) -> Entry:
    return Entry(name, tensor.numel() * tensor.element_size(), lambda: tensor)


def write(folder: Path, shard_bytes: int = 10**9) -> None:
    write_shards(folder, [entry(*item) for item in TENSORS.items()], shard_bytes)


@pytest.mark.parametrize(("shard_bytes", "files"), [(10**9, 1), (84, 1), (83, 2), (44, 2), (40, 3), (1, 4)])
def test_shards_hold_every_bit(shard_bytes: int, files: int, tmp_path: Path) -> None:
    write(tmp_path, shard_bytes)
    assert len(list(tmp_path.glob("*.safetensors"))) == files
    assert (tmp_path / INDEX).exists() is (files > 1)
    with Shards(tmp_path) as shards:
        assert shards.headers["c"] == ("BF16", (5, 4)) and shards.headers["b"] == ("I64", (2,))
        assert shards.headers["d"].shape == () and set(shards.headers) == set(TENSORS)
        for name, tensor in TENSORS.items():
            read = shards.read(name)
            assert read.dtype == tensor.dtype and torch.equal(read, tensor)
    if files > 1:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["metadata"]["total_size"] == 84 and list(index["weight_map"]) == ["a", "b", "c", "d"]
        assert index["weight_map"]["a"] == f"model-00001-of-{files:05}.safetensors"


def test_slices_of_one_tensor_get_storage_of_their_own(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    write_shards(tmp_path, [entry(str(i), whole[:, i : i + 2]) for i in (0, 2)])
    loaded = load_file(tmp_path / "model.safetensors")
    assert torch.equal(loaded["2"], whole[:, 2:]) and (tmp_path / "model.safetensors").stat().st_size < 300


def test_no_shard_size_below_a_byte(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="shard size 0: at least one byte"):
        write(tmp_path, 0)


def refused(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        Shards(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    return str(caught.value)


def test_directories_without_safetensors(tmp_path: Path) -> None:
    assert "no safetensors files" in refused(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin: is a pickle, and there are no safetensors files" in refused(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    assert f"neither model.safetensors nor {INDEX}" in refused(tmp_path)


@pytest.mark.parametrize("size", [0, 4, 60, -1])
def test_truncated_file_is_named(size: int, tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert f"{file}: truncated or no safetensors file" in refused(tmp_path)


def test_pointer_instead_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "copy or download it again" in refused(tmp_path)


def test_index_and_files_must_agree(tmp_path: Path) -> None:
    write(tmp_path, 44)
    index = json.loads((tmp_path / INDEX).read_text())
    second = tmp_path / "model-00002-of-00002.safetensors"

    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {**index["weight_map"], "z": second.name}}))
    assert "they do not belong together (they differ in z)" in refused(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {**index["weight_map"], "z": "../x.safetensors"}}))
    assert "only files beside the index are read" in refused(tmp_path)
    (tmp_path / INDEX).write_text("[]")
    assert "a JSON object is expected whose weight_map" in refused(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps(index))
    save_file({"c": TENSORS["c"], "d": TENSORS["d"], "a": TENSORS["a"]}, second)
    assert "tensor a lies in both model-00001-of-00002.safetensors and model-00002" in refused(tmp_path)
    second.unlink()
    assert "1 of 2 files of the index are absent (model-00002-of-00002.safetensors)" in refused(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "a JSON object is expected whose weight_map"),
        (json.dumps({"weight_map": {"a": "n" * 5000}}), r"names the file 'n{59}\.\.\.; only files beside"),
        (None, r"index\.json: cannot be read \(Is a directory\)"),
    ],
)
def test_an_unreadable_index(tmp_path: Path, text: str | None, message: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.mkdir() if text is None else index.write_text(text)
    with pytest.raises(InputError, match=message):
        Shards(tmp_path)


def test_files_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_shards(tmp_path, [Entry("a", 4, lambda: torch.ones(1))])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == 0o640
