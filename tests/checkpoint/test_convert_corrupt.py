"""A damaged source is one line that names the file, and nothing is written."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.release import tiny, write_release
from undertow.cli import main

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def header(file: Path, change: Callable[[dict], object]) -> None:
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    values = json.loads(data[8 : 8 + size])
    change(values)
    text = json.dumps(values).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def index(folder: Path, change: Callable[[dict], object]) -> None:
    values = json.loads((folder / INDEX).read_text())
    change(values["weight_map"])
    (folder / INDEX).write_text(json.dumps(values))


def config(folder: Path, **changes: object) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))


def retype(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for file in (folder / FIRST, folder / SECOND):
        tensors = load_file(file)
        if name in tensors:
            save_file({**tensors, name: change(tensors[name])}, file)


def truncated(folder: Path) -> None:
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-100])


def long_header(folder: Path) -> None:
    (folder / FIRST).write_bytes(struct.pack("<Q", 1 << 40) + (folder / FIRST).read_bytes()[8:])


def overlapping(folder: Path) -> None:
    def change(values: dict) -> None:
        last = max((name for name in values if name != "__metadata__"), key=lambda n: values[n]["data_offsets"])
        begin, end = values[last]["data_offsets"]
        values[last]["data_offsets"] = [begin - 8, end - 8]

    header(folder / FIRST, change)


def twice_in_header(folder: Path) -> None:
    data = (folder / FIRST).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    text = data[8 : 8 + size].rstrip()
    entry = b',"embed.weight":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
    text = text[:-1] + entry
    (folder / FIRST).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def twice_in_index(folder: Path) -> None:
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('{"weight_map": {', '{"weight_map": {"embed.weight": "x.safetensors", '))


def many_twice(folder: Path) -> None:
    entries = ",".join(f'"n{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(50_000))
    text = f'{{{entries},"n49999":1}}'.encode()
    (folder / FIRST).write_bytes(struct.pack("<Q", len(text)) + text)


def in_utf16(folder: Path) -> None:
    data = (folder / FIRST).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    text = data[8 : 8 + size].decode().encode("utf-16")
    (folder / FIRST).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def renamed(name: str) -> Callable[[Path], None]:
    """The embedding under another name, in its file alone."""

    def change(values: dict) -> None:
        values[name] = values.pop("embed.weight")

    return lambda folder: header(folder / FIRST, change)


def shape(value: object) -> Callable[[Path], None]:
    return lambda folder: header(folder / FIRST, lambda values: values["embed.weight"].update(shape=value))


def in_two_files(folder: Path) -> None:
    tensors = load_file(folder / SECOND)
    save_file({**tensors, "embed.weight": torch.zeros(1)}, folder / SECOND)


def pickled(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    (folder / INDEX).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"embed.weight": [1.0]}))


def pickle_as_shard(folder: Path) -> None:
    (folder / FIRST).write_bytes(pickle.dumps({"embed.weight": [1.0]}))


def archive_as_shard(folder: Path) -> None:
    torch.save({"embed.weight": torch.ones(3)}, folder / FIRST)


def loop(folder: Path) -> None:
    (folder / FIRST).unlink()
    (folder / FIRST).symlink_to(folder / SECOND)
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to(folder / FIRST)


def loop_of_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / INDEX).symlink_to(folder / INDEX)


def pipe(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return make


SCALE = "layers.0.attn.wq_a.scale"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncated, f"{SECOND}: truncated or no safetensors file"),
    "wrong header": (lambda f: (f / FIRST).write_bytes(b"\x10" + bytes(7) + b"x" * 40), "its header is no JSON"),
    "empty": (lambda f: (f / FIRST).write_bytes(b""), f"{FIRST}: truncated or no safetensors file"),
    "longer header than file": (long_header, "its header would take 1099511627776 of"),
    "brackets": (
        lambda f: (f / FIRST).write_bytes(struct.pack("<Q", 100_000) + b"[" * 100_000),
        "its header is no JSON",
    ),
    "overlap": (overlapping, "overlaps the tensor before it"),
    "wrong size": (lambda f: header(f / FIRST, lambda v: v["embed.weight"].update(shape=[1])), "which takes 2 bytes"),
    "negative": (lambda f: header(f / FIRST, lambda v: v["embed.weight"].update(shape=[-1])), "has no dtype, shape"),
    "unknown type": (lambda f: header(f / FIRST, lambda v: v["embed.weight"].update(dtype="X")), "unknown type 'X'"),
    "type that is a list": (lambda f: header(f / FIRST, lambda v: v["embed.weight"].update(dtype=[])), "has no dtype"),
    "many twice in a header": (many_twice, "its header names 'n49999' twice"),
    "header in UTF-16": (in_utf16, "its header is no JSON"),
    "shape that is a text": (shape(""), "the entry of embed.weight has no dtype, shape"),
    "shape that is an object": (shape({}), "the entry of embed.weight has no dtype, shape"),
    "too many sides": (shape([1] * 100_000), "embed.weight has 100000 dimensions, 64 at most are read"),
    "sides beyond count": (
        shape([2**62] * 64),
        "embed.weight is BF16 [4611686018427387904, 4611686018427387904, 46116860184273879..., whose sides are too",
    ),
    "long sides of nothing": (
        lambda f: header(f / FIRST, lambda v: v["embed.weight"].update(shape=[0, 2**62, 2], data_offsets=[0, 0])),
        "embed.weight is BF16 [0, 4611686018427387904, 2], whose sides are too long",
    ),
    "name that steers a terminal": (renamed("a\nb\x1b[31mc"), "(they differ in a\\u000ab\\u001b[31mc, embed.weight)"),
    "long name": (renamed("a" * 100_000), f"(they differ in {'a' * 60}..., embed.weight)"),
    "file above": (lambda f: index(f, lambda m: m.update({"embed.weight": ".."})), "the file '..'; only files beside"),
    "file without a name": (lambda f: index(f, lambda m: m.update({"embed.weight": ""})), "the file ''; only files"),
    "more MTP blocks than files hold": (
        lambda f: config(f, num_nextn_predict_layers=2),
        "config.json: num_nextn_predict_layers is 2, the files hold 1 MTP block; set it to 1",
    ),
    "missing shard": (lambda f: (f / SECOND).unlink(), "1 of 2 files of the index are absent"),
    "twice in a header": (twice_in_header, "its header names 'embed.weight' twice"),
    "twice in the index": (twice_in_index, "names 'embed.weight' twice"),
    "in two files": (in_two_files, f"tensor embed.weight lies in both {FIRST} and {SECOND}"),
    "scale of a wrong type": (
        lambda f: retype(f, SCALE, lambda t: t.view(torch.uint8)),
        "layers.0.attn.wq_a.weight: its scale is torch.uint8",
    ),
    "scale of a wrong shape": (lambda f: retype(f, SCALE, lambda t: t.repeat(1, 4)), "scales of shape [1, 8]"),
    "traversal": (lambda f: index(f, lambda m: m.update({"embed.weight": "../x.safetensors"})), "only files beside"),
    "absolute": (lambda f: index(f, lambda m: m.update({"embed.weight": "/etc/passwd"})), "only files beside"),
    "half a pair": (
        lambda f: index(f, lambda m: m.update({"embed.weight": "\ud800.safetensors"})),
        "only files beside",
    ),
    "nothing listed": (
        lambda f: (f / INDEX).write_text('{"weight_map": {}}'),
        "its files hold no weights",
    ),
    "experts beyond number": (
        lambda f: config(f, n_routed_experts=10**8),
        "n_routed_experts is 100000000, the routers of the tensor files have 8",
    ),
    "pickle": (pickled, "pytorch_model.bin: is a pickle, and there are no safetensors files; pickles are"),
    "pickle as shard": (pickle_as_shard, f"{FIRST}: is a pickle under another name; pickles are never read"),
    "archive as shard": (archive_as_shard, f"{FIRST}: is a pickle under another name; pickles are never read"),
    "pickle in the index": (
        lambda f: index(f, lambda m: m.update({"embed.weight": "pytorch_model.bin"})),
        f"pytorch_model.bin: is a pickle that {INDEX} lists; pickles are never read",
    ),
    "loop of links": (loop, f"{FIRST}: cannot be read (Too many levels of symbolic links)"),
    "index that is a loop": (loop_of_index, f"{INDEX}: cannot be read"),
    "pipe as shard": (pipe(FIRST), f"{FIRST}: cannot be read (a pipe or a device, no file)"),
    "pipe as index": (pipe(INDEX), f"{INDEX}: cannot be read (a pipe or a device, no file)"),
    "pipe as config": (pipe("config.json"), "config.json: cannot be read (a pipe or a device, no file)"),
    "config": (lambda f: (f / "config.json").write_text("["), "config.json: not valid JSON"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: no such file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("options", [[], ["--dtype", "bf16"]])
def test_damage_is_one_line_and_nothing_is_written(
    damage: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    write_release(source, tiny())
    break_it, message = DAMAGES[damage]
    break_it(source)
    assert main(["convert", str(source), str(tmp_path / "made"), *options]) == 2
    output = capsys.readouterr()
    assert output.err.count("\n") == 1 and output.err.startswith("error: ") and message in output.err
    assert len(output.err) < 1000 and "\x1b" not in output.err
    assert "Traceback" not in output.err and output.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("options", [[], ["--dtype", "bf16"]])
def test_a_wrong_dialect_found_on_the_way_leaves_nothing(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, name = tmp_path / "source", "layers.3.attn.wo_b.weight"
    write_release(source, tiny())

    def relabel(tensor: torch.Tensor) -> torch.Tensor:
        codes = tensor.view(torch.uint8).clone()
        codes[-1, -1] = 0x80
        return codes.view(torch.float8_e4m3fnuz)

    retype(source, name, relabel)
    assert main(["convert", str(source), str(tmp_path / "made"), "--shard-bytes", "50000", *options]) == 2
    assert f"{name}: " in (said := capsys.readouterr().err) and "so the label is likely wrong" in said
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
