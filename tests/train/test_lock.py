"""One process holds a run directory; one that died, in whatever way, does not."""

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from undertow.config.errors import InputError
from undertow.train.lock import locked

HOLD = """
import sys
from pathlib import Path
from undertow.train.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(directory: Path) -> subprocess.Popen:
    """A process that holds the directory until its input ends."""
    command = [sys.executable, "-c", HOLD, str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_another_process_is_named_and_a_killed_one_does_not_block(tmp_path):
    run = tmp_path / "run"
    with holder(run) as process:
        with (
            pytest.raises(InputError, match=rf"run: process {process.pid} on .* is at work there; wait for it or"),
            locked(run),
        ):
            pass
        process.kill()
    assert [path.name for path in run.iterdir()] == [".lock"]
    with locked(run):
        assert (run / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    assert list(run.iterdir()) == [], "made by the other one, so it stays"


def test_one_that_ends_leaves_nothing(tmp_path):
    with holder(tmp_path / "run") as process:
        process.communicate("")
    assert process.returncode == 0 and list(tmp_path.iterdir()) == []


def test_two_runs_of_one_process_follow_each_other(tmp_path):
    for _ in range(2):
        with locked(tmp_path / "run"):
            with pytest.raises(InputError, match=f"process {os.getpid()} on"), locked(tmp_path / "run"):
                pass
            (tmp_path / "run" / "kept").touch()
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["kept"]


def test_an_error_releases_it(tmp_path):
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "run"):
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []


def test_never_two_at_once(tmp_path):
    """Threads that take and leave it as fast as they can, so that it is removed under those that open it."""
    at_work, most, taken = [], [], []

    def worker() -> None:
        for _ in range(300):
            try:
                with locked(tmp_path / "run"):
                    at_work.append(1)
                    most.append(len(at_work))
                    at_work.pop()
            except InputError:
                continue
            taken.append(1)

    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and len(taken) > 100


def test_a_file_that_its_last_holder_removed_between_open_and_lock(tmp_path, monkeypatch):
    run, lock, gone = tmp_path / "run", fcntl.flock, []

    def late(handle: int, how: int) -> None:
        if not gone:
            gone.append(True)
            (run / ".lock").unlink()
            run.rmdir()
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(run), pytest.raises(InputError, match="is at work there"), locked(run):
        pass


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(InputError, match=r"file/run: cannot be written \(Not a directory\); give out=DIR"),
        locked(tmp_path / "file" / "run"),
    ):
        pass
