"""A damaged checkpoint is one line that names the file; the others are as good as before."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.runs import CURSOR, learned, loaded, same, state_of
from tests.engine.bytelevel import tokenizer
from undertow.checkpoint.training import Progress, latest_checkpoint, load_checkpoint, save_checkpoint
from undertow.config.errors import InputError

TENSORS = ("model.safetensors", "optimizer.safetensors")
TEXTS = ("config.json", "progress.json")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints, not to be changed."""
    folder = tmp_path_factory.mktemp("sound")
    for step in (1, 2):
        save_checkpoint(folder, *learned(steps=step), Progress(step, 100 * step, CURSOR), tokenizer())
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "checkpoints"))


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def header(file: Path, change: Callable[[dict], None]) -> None:
    """Rewrite the header of a safetensors file."""
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    values = json.loads(data[8 : 8 + size])
    change(values)
    text = json.dumps(values).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def first(values: dict) -> dict:
    return values[min(name for name in values if name != "__metadata__")]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: cut(file, 0),
    "a few bytes": lambda file: cut(file, 7),
    "half": lambda file: cut(file, file.stat().st_size // 2),
    "the last two bytes missing": lambda file: cut(file, file.stat().st_size - 2),
    "a directory": lambda file: (file.unlink(), file.mkdir()),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
}
OF_TENSORS: dict[str, Callable[[Path], object]] = {
    "a byte too many": longer,
    "another type": lambda file: header(file, lambda v: first(v).update(dtype="I32")),
    "another shape": lambda file: header(file, lambda v: first(v).update(shape=[1])),
    "another place": lambda file: header(file, lambda v: first(v).update(data_offsets=[0, 2**40])),
    "a tensor less": lambda file: header(file, lambda v: v.pop(min(n for n in v if n != "__metadata__"))),
    "another name": lambda file: header(file, lambda v: v.update(foreign=v.pop(max(v)))),
}
OF_TEXTS: dict[str, Callable[[Path], object]] = {
    "no JSON": lambda file: file.write_text("{"),
    "a list": lambda file: file.write_text("[1]"),
    "no object at all": lambda file: file.write_text("null"),
    "other keys": lambda file: file.write_text('{"colour": 1}'),
    "not UTF-8": lambda file: file.write_bytes(b"\xff\xfe{}"),
}
CASES = [
    *((file, name, damage) for file in (*TENSORS, *TEXTS) for name, damage in DAMAGES.items()),
    *((file, name, damage) for file in TENSORS for name, damage in OF_TENSORS.items()),
    *((file, name, damage) for file in TEXTS for name, damage in OF_TEXTS.items()),
]


@pytest.mark.parametrize(("file", "damage"), [(f, d) for f, _, d in CASES], ids=[f"{f}: {n}" for f, n, _ in CASES])
def test_it_is_told_in_one_line(folder: Path, file: str, damage: Callable[[Path], object]) -> None:
    damage(folder / "step-2" / file)
    model, optimizer = learned(seed=5)
    with pytest.raises(InputError) as caught:
        load_checkpoint(folder / "step-2", model, optimizer)
    message = str(caught.value)
    assert "\n" not in message and str(folder / "step-2") in message and caught.value.exit_code == 2


def test_the_others_are_intact(folder: Path) -> None:
    for file in TENSORS:
        cut(folder / "step-2" / file, 100)
    (folder / "latest").write_text("step-1\n")
    latest = latest_checkpoint(folder)
    assert latest == folder / "step-1"
    progress, state = loaded(latest)
    assert progress.step == 1 and same(state, state_of(*learned(steps=1)))
    save_checkpoint(folder, *learned(steps=2), Progress(2, 200, CURSOR))
    assert loaded(folder / "step-2")[0].step == 2, "the damaged one is replaced when its step is reached again"


@pytest.mark.parametrize("file", TENSORS)
def test_flipped_bits_of_a_header_are_refused_or_harmless(folder: Path, file: str) -> None:
    """A name, type, shape or place that is another is one line, whichever bit it was."""
    path = folder / "step-2" / file
    data, draw, refused = path.read_bytes(), random.Random(3), 0
    size = 8 + struct.unpack("<Q", data[:8])[0]
    model, optimizer = learned(steps=0)
    for _ in range(60):
        spoilt = bytearray(data)
        spoilt[draw.randrange(size)] ^= 1 << draw.randrange(8)
        path.write_bytes(spoilt)
        try:
            load_checkpoint(folder / "step-2", model, optimizer)
        except InputError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 40
