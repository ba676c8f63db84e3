"""Checkpoints of a run: complete or absent, whatever happens, and never another model's."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch

from tests.checkpoint.runs import CONFIG, CURSOR, learned, same, state_of
from tests.model.small import small_config
from undertow.checkpoint import shards
from undertow.checkpoint.training import Progress, latest_checkpoint, load_checkpoint, save_checkpoint
from undertow.config.errors import InputError, UndertowError
from undertow.model.build import build_model


def test_everything_comes_back(tmp_path):
    model, optimizer = learned(seed=1, steps=3)
    wanted = state_of(model, optimizer)
    path = save_checkpoint(tmp_path, model, optimizer, Progress(3, 300, CURSOR, 2, 1))
    drawn = torch.rand(4)
    other, others = learned(seed=2, steps=0)
    assert latest_checkpoint(tmp_path) == path == tmp_path / "step-3"
    assert load_checkpoint(path, other, others) == Progress(3, 300, CURSOR, skipped=2, skipped_in_row=1)
    got = state_of(other, others)
    assert same(got, wanted)
    assert "norm.weight/exp_avg" not in got and "embed.weight/exp_avg" in got
    assert torch.equal(torch.rand(4), drawn)


def test_nothing_in_it_is_pickled(tmp_path):
    path = save_checkpoint(tmp_path, *learned(), Progress(1, 1, CURSOR))
    assert sorted(p.name for p in path.iterdir()) == [
        *("config.json", "model.safetensors", "optimizer.safetensors", "progress.json")
    ]


def test_a_full_disk_leaves_the_last_one(tmp_path, monkeypatch):
    kept = save_checkpoint(tmp_path, *learned(), Progress(1, 100, CURSOR))

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shards, "save_file", full)
    with pytest.raises(UndertowError, match=r"step-2: the checkpoint cannot be written \(.*No space left") as raised:
        save_checkpoint(tmp_path, *learned(steps=2), Progress(2, 200, CURSOR))
    assert raised.value.exit_code == 1
    assert latest_checkpoint(tmp_path) == kept
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-1"]


def test_no_checkpoint_yet(tmp_path):
    assert latest_checkpoint(tmp_path / "none") is None


@pytest.mark.parametrize("name", ["step-9", "../elsewhere", "", "step-1x", "step-" + "9" * 5000])
def test_latest_that_names_nothing(tmp_path, name):
    for step in (10, "foo", "9" * 100):
        (tmp_path / f"step-{step}").mkdir()
    (tmp_path / "latest").write_text(name)
    reason = r"(names '.*', which is no checkpoint here|cannot be read .*4,096 bytes.*)"
    with pytest.raises(InputError, match=rf"latest: {reason}; .*\(there are step-10\)"):
        latest_checkpoint(tmp_path)


def test_another_models_checkpoint(tmp_path):
    path = save_checkpoint(tmp_path, *learned(), Progress(1, 1, CURSOR))
    model = build_model(small_config(index_topk=2))
    with pytest.raises(InputError, match="of another model: its index_topk is 3, this run's is 2"):
        load_checkpoint(path, model, torch.optim.AdamW(model.parameters()))


def test_a_lost_latest_is_the_highest_step(tmp_path):
    for name in ("step-2", "step-10", "step-foo"):
        (tmp_path / name).mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-10"


def test_a_latest_that_is_a_directory(tmp_path):
    (tmp_path / "step-2").mkdir()
    (tmp_path / "latest").mkdir()
    with pytest.raises(InputError, match=r"latest: cannot be read \(Is a directory\); .*\(there are step-2\)"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        {"step": -1},
        {"tokens": -5},
        {"tokens": 10**30},
        {"step": True},
        {"step": 2},
        {"skipped": None},
        {"skipped_in_row": 3},
    ],
)
def test_progress_that_cannot_be(tmp_path, changed):
    path = save_checkpoint(tmp_path, *learned(), Progress(1, 1, CURSOR))
    values = json.loads((path / "progress.json").read_text())
    (path / "progress.json").write_text(json.dumps(values | changed))
    with pytest.raises(InputError, match=r"progress\.json: damaged: .*; resume from an earlier checkpoint"):
        load_checkpoint(path, *learned())


def test_another_dtype_is_refused(tmp_path):
    path = save_checkpoint(tmp_path, *learned(), Progress(1, 1, CURSOR))
    model = build_model(CONFIG, dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"of a run in float32, this run is in bfloat16; .*numerics\.dtype=float32"):
        load_checkpoint(path, model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("where", ["weight", "moment"])
def test_what_is_not_finite_is_not_saved(tmp_path, where):
    kept = save_checkpoint(tmp_path, *learned(), Progress(1, 1, CURSOR))
    model, optimizer = learned(steps=2)
    tensor = model.head.weight if where == "weight" else optimizer.state[model.head.weight]["exp_avg"]
    with torch.no_grad():
        tensor[0, 0] = float("inf")
    with pytest.raises(UndertowError, match=r"step-2: head\.weight(/exp_avg)? is not finite; .*are intact") as raised:
        save_checkpoint(tmp_path, model, optimizer, Progress(2, 2, CURSOR))
    assert raised.value.exit_code == 1 and latest_checkpoint(tmp_path) == kept
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-1"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "[" * 100_000, '{"step": 1}', json.dumps({"step": "1", "tokens": 1, "cursor": {}})],
    ids=range(5),
)
def test_damaged_progress(tmp_path, text):
    path = save_checkpoint(tmp_path, *learned(), Progress(1, 1, CURSOR))
    (path / "progress.json").write_text(text)
    with pytest.raises(InputError, match=r"progress\.json: damaged: a JSON object with step, tokens, cursor"):
        load_checkpoint(path, *learned())


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_truncated_tensors(tmp_path, file):
    path = save_checkpoint(tmp_path, *learned(), Progress(1, 1, CURSOR))
    data = (path / file).read_bytes()
    (path / file).write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=rf"{file}: (truncated|damaged)"):
        load_checkpoint(path, *learned())
