"""Checkpoints of several ranks: one format, whatever wrote it, that every layout and one process read to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parallel.checkpoints import LAYOUTS, Run, read, whole_state, written
from undertow import load_model
from undertow.checkpoint.convert.conversion import convert
from undertow.checkpoint.convert.target import Wish
from undertow.checkpoint.joint import Joint
from undertow.checkpoint.training import Progress
from undertow.config.errors import InputError

SOME = ["one process", "FSDP2", "EP2", "EP2 x FSDP2", "HSDP 2x2"]
PIPELINES = ["PP2", "PP2, 2 stages each", "PP2 x EP2", "PP2 x FSDP2"]


@pytest.fixture(scope="module")
def gangs(two, four):
    def run(layout, function, *arguments):
        ranks = LAYOUTS[layout][0]
        return (
            [function(layout, *arguments)] if ranks == 1 else {2: two, 4: four}[ranks].run(function, layout, *arguments)
        )

    return run


@pytest.fixture(scope="module")
def folders(gangs, tmp_path_factory):
    """The checkpoint of each layout, written once."""
    held: dict[tuple[str, torch.dtype], Path] = {}

    def of(layout, dtype=torch.float32):
        if (layout, dtype) not in held:
            folder = tmp_path_factory.mktemp("run")
            paths = set(gangs(layout, written, folder, dtype))
            assert paths == {str(folder / "step-3")}
            held[layout, dtype] = folder / "step-3"
        return held[layout, dtype]

    return of


@pytest.mark.parametrize("reader", SOME)
@pytest.mark.parametrize("writer", SOME)
def test_every_layout_reads_every_other(gangs, folders, writer, reader):
    for differences, progress, _ in gangs(reader, read, folders(writer)):
        assert differences == [] and progress == Progress(3, 300, {"epoch": 1})


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        *((layout, "EP2 x FSDP2") for layout in PIPELINES),
        *(("one process", layout) for layout in PIPELINES),
        ("PP2 x FSDP2", "PP2, 2 stages each"),
        ("EP4 x FSDP4", "PP2"),
        ("PP2", "EP4 x FSDP4"),
    ],
)
def test_stages_hold_the_names_of_the_whole_model(gangs, folders, writer, reader):
    for differences, progress, _ in gangs(reader, read, folders(writer)):
        assert differences == [] and progress.step == 3


@pytest.mark.parametrize(("writer", "reader"), [("EP2 x FSDP2", "FSDP2"), ("FSDP2", "one process")])
def test_bfloat16_with_remainders(gangs, folders, writer, reader):
    path = folders(writer, torch.bfloat16)
    assert [found[0] for found in gangs(reader, read, path, torch.bfloat16)] == [[]] * LAYOUTS[reader][0]


@pytest.mark.parametrize("layout", SOME[1:])
def test_a_model_directory_like_any_other(folders, layout):
    model, whole = load_model(folders(layout)), whole_state(torch.float32)[0].state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in model.state_dict().items())


def test_files_do_not_tell_the_layout(folders):
    first, *others = [folders(layout) for layout in ("DP2", *SOME[1:], *PIPELINES)]
    assert sorted(path.name for path in first.iterdir()) == sorted(
        path.name for path in folders("one process").iterdir()
    )
    assert sorted(path.name for path in first.parent.iterdir()) == ["latest", "step-3"]
    for other in others:
        for name in ("model.safetensors", "config.json"):
            assert (first / name).read_bytes() == (other / name).read_bytes()


def written_in_small_files(folder):
    run = Run("EP2", True)
    joint = Joint(run.mesh, shard_bytes=100_000)
    portion = joint.take(run.model, run.optimizer, Progress(3, 300, {"epoch": 1}), folder)
    try:
        return str(joint.publish(folder, portion, None))
    finally:
        joint.close()


def test_numbered_files(two, gangs, tmp_path):
    path = Path(two.run(written_in_small_files, tmp_path)[0])
    names = sorted(file.name for file in path.iterdir())
    numbered = [[name for name in names if name.startswith(f"{stem}-0")] for stem in ("model", "optimizer")]
    assert all(len(found) > 3 for found in numbered)
    assert [name for name in names if name not in numbered[0] + numbered[1]] == [
        *("config.json", "model.safetensors.index.json", "optimizer.safetensors.index.json", "progress.json")
    ]
    for reader in ("one process", "FSDP2"):
        assert all(found[0] == [] for found in gangs(reader, read, path))
    (path / numbered[1][1]).unlink()
    with pytest.raises(InputError, match=r"optimizer-00002-of-\d+.safetensors"):
        read("one process", path)


def test_it_converts(folders, tmp_path):
    for layout in ("one process", "PP2 x EP2"):
        convert(folders(layout), tmp_path / layout, Wish("released"))
    one, other = (load_model(tmp_path / layout).state_dict() for layout in ("one process", "PP2 x EP2"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
