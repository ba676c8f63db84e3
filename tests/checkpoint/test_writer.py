"""Checkpoints written beside the training: of the moment of the call, one after another, and no error lost."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.checkpoint.runs import CURSOR, learn, learned, loaded, same, state_of
from undertow.checkpoint import folder as module
from undertow.checkpoint.training import Progress, latest_checkpoint, save_checkpoint
from undertow.checkpoint.writer import CheckpointWriter
from undertow.config.errors import UndertowError


@pytest.fixture
def gate(monkeypatch) -> threading.Event:
    """Files are written only once it is set."""
    opened, write = threading.Event(), module.write_files

    def behind_gate(*given):
        assert opened.wait(30)
        write(*given)

    monkeypatch.setattr(module, "write_files", behind_gate)
    return opened


def steps(paths) -> list[str]:
    return [path.name for path in paths]


def test_what_is_written_is_the_state_at_the_call(tmp_path, gate):
    model, optimizer = learned(seed=1, steps=3)
    cursor = dict(CURSOR)
    wanted, random, done = state_of(model, optimizer), torch.get_rng_state(), []
    with CheckpointWriter(tmp_path, None, None, done.append) as writer:
        writer.save(model, optimizer, Progress(3, 300, cursor))
        learn(model, optimizer)
        torch.rand(5)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.zero_()
            for state in optimizer.state.values():
                for tensor in state.values():
                    tensor.fill_(7)
        assert latest_checkpoint(tmp_path) is None and not done
        gate.set()
    assert done == [tmp_path / "step-3"] == [latest_checkpoint(tmp_path)]
    progress, state = loaded(done[0])
    assert progress == Progress(3, 300, CURSOR) and same(state, wanted)
    assert torch.equal(torch.get_rng_state(), random)


def test_it_holds_the_same_bytes_as_the_synchronous_form(tmp_path):
    model, optimizer = learned(steps=2)
    with CheckpointWriter(tmp_path / "one", None, None, lambda path: None) as writer:
        writer.save(model, optimizer, Progress(2, 200, CURSOR))
    save_checkpoint(tmp_path / "other", model, optimizer, Progress(2, 200, CURSOR))
    one, other = ({p.name: p.read_bytes() for p in (tmp_path / n / "step-2").iterdir()} for n in ("one", "other"))
    assert one == other and len(one) == 4


def test_one_after_another_each_told_once_in_the_callers_thread(tmp_path, gate):
    model, optimizer = learned()
    told = []
    writer = CheckpointWriter(tmp_path, None, 2, lambda path: told.append((path.name, threading.current_thread())))
    writer.poll()
    writer.save(model, optimizer, Progress(1, 100, CURSOR))
    writer.poll()
    assert told == [], "poll does not wait"
    gate.set()
    for step in (2, 3, 4):
        writer.save(model, optimizer, Progress(step, 100 * step, CURSOR))
        assert len(told) == step - 1, "a save waits for the one before"
    writer.wait()
    writer.wait()
    assert told == [(f"step-{step}", threading.main_thread()) for step in (1, 2, 3, 4)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-3", "step-4"]
    writer.save(model, optimizer, Progress(5, 500, CURSOR))
    while len(told) < 5:
        writer.poll()
    assert told[-1][0] == "step-5"


@pytest.mark.parametrize("surfaces", ["save", "wait", "poll", "leaving"])
def test_an_error_of_the_thread_surfaces_once(tmp_path, surfaces):
    model, optimizer = learned()
    folder, done = tmp_path / "checkpoints", []
    folder.write_text("in the way")
    with (
        pytest.raises(UndertowError, match=r"step-1: the checkpoint cannot be written \(.*File exists") as raised,
        CheckpointWriter(folder, None, None, done.append) as writer,
    ):
        writer.save(model, optimizer, Progress(1, 100, CURSOR))
        if surfaces == "save":
            writer.save(model, optimizer, Progress(2, 200, CURSOR))
        elif surfaces == "wait":
            writer.wait()
        elif surfaces == "poll":
            while True:
                writer.poll()
    assert raised.value.exit_code == 1 and done == []
    folder.unlink()
    writer.save(model, optimizer, Progress(2, 200, CURSOR))
    writer.wait()
    assert steps(done) == ["step-2"]


def test_an_error_of_the_block_goes_before_one_of_the_thread(tmp_path, gate):
    model, optimizer = learned()
    done = []
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path, None, None, done.append) as writer:
        writer.save(model, optimizer, Progress(1, 100, CURSOR))
        gate.set()
        raise KeyboardInterrupt
    assert steps(done) == ["step-1"], "what was under way is finished"


def test_what_is_not_finite_is_not_taken(tmp_path):
    model, optimizer = learned()
    with CheckpointWriter(tmp_path, None, None, lambda path: None) as writer:
        writer.save(model, optimizer, Progress(1, 100, CURSOR))
        with torch.no_grad():
            model.head.weight[0, 0] = float("nan")
        with pytest.raises(UndertowError, match=r"step-2: head\.weight is not finite; .*are intact"):
            writer.save(model, optimizer, Progress(2, 200, CURSOR))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-1"]


def test_a_failed_removal_does_not_hide_the_checkpoint(tmp_path, monkeypatch):
    model, optimizer = learned()
    done = []
    writer = CheckpointWriter(tmp_path, None, 1, done.append)
    writer.save(model, optimizer, Progress(1, 100, CURSOR))
    writer.wait()

    def refused(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module, "_remove", refused)
    writer.save(model, optimizer, Progress(2, 200, CURSOR))
    with pytest.raises(UndertowError, match=r"step-1: an old checkpoint that cannot be removed"):
        writer.wait()
    assert steps(done) == ["step-1", "step-2"] and latest_checkpoint(tmp_path) == tmp_path / "step-2"
