"""The folder of checkpoints: killed at any moment it holds complete ones alone, and as many as are wanted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.runs import CURSOR, learned, loaded
from undertow.checkpoint import folder as module
from undertow.checkpoint import publish as swapping
from undertow.checkpoint import snapshot
from undertow.checkpoint.folder import checkpoint_path, latest_checkpoint, prune, publish, steps_in
from undertow.checkpoint.progress import read_progress
from undertow.checkpoint.snapshot import Snapshot, take_snapshot
from undertow.checkpoint.training import Progress, save_checkpoint
from undertow.config.errors import InputError, UndertowError


def saved(folder: Path, *steps: int) -> None:
    model, optimizer = learned()
    for step in steps:
        save_checkpoint(folder, model, optimizer, Progress(step, 100 * step, CURSOR))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def content(path: Path) -> dict[str, bytes]:
    """The files of a checkpoint, but for the step in one of them."""
    assert read_progress(path / "progress.json")[0].step
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != "progress.json"}


def killed(folder: Path, taken: Snapshot, moment: int) -> bool:
    """Publish and prune to one, in a process that dies before its `moment`-th call to the disk; whether it did die."""
    child = os.fork()
    if child == 0:
        calls = iter(range(moment))

        def counted(function):
            def until(*given, **named):
                if next(calls, None) is None:
                    os._exit(9)
                return function(*given, **named)

            return until

        for place, name in ((snapshot, "sync"), (module, "sync"), (swapping, "_exchange"), (os, "rename")):
            setattr(place, name, counted(getattr(place, name)))
        os.replace, os.unlink, os.rmdir = counted(os.replace), counted(os.unlink), counted(os.rmdir)
        try:
            publish(folder, taken, None)
            prune(folder, 1)
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


def test_a_pipe_is_not_waited_for(tmp_path):
    saved(tmp_path, 1)
    (tmp_path / "step-1" / "progress.json").unlink()
    os.mkfifo(tmp_path / "step-1" / "progress.json")
    with pytest.raises(InputError, match=r"progress\.json: damaged"):
        read_progress(tmp_path / "step-1" / "progress.json")
    (tmp_path / "latest").unlink()
    os.mkfifo(tmp_path / "latest")
    with pytest.raises(InputError, match=r"latest: cannot be read \(it is no regular file\)"):
        latest_checkpoint(tmp_path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("again", [False, True], ids=["a new step", "the latest step once more"])
@pytest.mark.parametrize("exchange", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_killed_at_any_moment_it_holds_complete_checkpoints_alone(tmp_path, monkeypatch, again, exchange):
    if not exchange:
        monkeypatch.setattr(swapping, "_exchange", lambda one, other: False)
    step, tokens = (2, 777) if again else (3, 300)
    saved(tmp_path / "before", 1, 2)
    taken = take_snapshot(*learned(), Progress(step, tokens, CURSOR), tmp_path)
    whole, found = content(tmp_path / "before" / "step-2"), []
    for moment in range(100):
        folder = Path(shutil.copytree(tmp_path / "before", tmp_path / str(moment)))
        died = killed(folder, taken, moment)
        latest = latest_checkpoint(folder)
        assert latest is not None
        found.append(read_progress(latest / "progress.json")[0].tokens)
        for path in (latest, *(checkpoint_path(folder, held) for held in steps_in(folder))):
            assert content(path) == whole
        if not died:
            break
        if moment % 5 == 0:
            saved(folder, 4)
            assert names(folder) == ["latest", *(f"step-{n}" for n in steps_in(folder))], "leftovers are swept"
        shutil.rmtree(folder)
    # The old one up to one moment, the new one from then on.
    assert found == sorted(found) and set(found) == {200, tokens} and len(found) > 15
    assert names(folder) == ["latest", f"step-{step}"]


def test_the_newest_stay(tmp_path):
    saved(tmp_path, 1, 2, 10, 11)
    prune(tmp_path, 3)
    assert names(tmp_path) == ["latest", "step-10", "step-11", "step-2"]
    prune(tmp_path, 3)
    prune(tmp_path, 1)
    assert names(tmp_path) == ["latest", "step-11"]
    assert loaded(tmp_path / "step-11")[0].step == 11


def test_after_a_return_to_an_earlier_step_the_later_ones_do_not_count(tmp_path):
    saved(tmp_path, 1, 2, 3, 8, 9)
    (tmp_path / "latest").write_text("step-3\n")
    prune(tmp_path, 2)
    assert names(tmp_path) == ["latest", "step-2", "step-3", "step-8", "step-9"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-3"


def test_other_names_are_left_alone(tmp_path):
    saved(tmp_path, 1, 2)
    for name in ("step-01", "step-0x1", "best", "step-1.old"):
        (tmp_path / name).mkdir()
    prune(tmp_path, 1)
    assert names(tmp_path) == ["best", "latest", "step-01", "step-0x1", "step-1.old", "step-2"]


def test_a_checkpoint_that_lies_elsewhere_loses_its_name_alone(tmp_path):
    saved(tmp_path / "run", 1, 2)
    (tmp_path / "run" / "step-1").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "step-1").symlink_to(tmp_path / "elsewhere")
    prune(tmp_path / "run", 1)
    assert names(tmp_path / "run") == ["latest", "step-2"]
    assert loaded(tmp_path / "elsewhere")[0].step == 1


def test_one_that_cannot_be_removed_is_told(tmp_path, monkeypatch):
    saved(tmp_path, 1, 2)

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refused)
        with pytest.raises(
            UndertowError, match=r"step-1: an old .* cannot be removed \(.*Permission denied\); step-2 is"
        ):
            prune(tmp_path, 1)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-2"


def test_no_checkpoint_is_nothing_to_prune(tmp_path):
    prune(tmp_path, 1)
    assert names(tmp_path) == []
