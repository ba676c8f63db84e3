"""A run on a full disk ends with one line, and goes on when there is room."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests import small_disk
from tests.train.events import shown
from undertow.config.errors import UndertowError
from undertow.train.metrics import MetricsFile, read_metrics
from undertow.train.run import RunDirectory
from undertow.train.tracking import open_trackers


@pytest.mark.skipif(not small_disk.possible(), reason="no file system may be mounted here")
def test_a_run_on_a_full_disk(tmp_path):
    result = small_disk.on_small_disk("tests.train.full_disk", tmp_path, "16m")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    for pages, (code, error) in found["said"].items():
        assert code == 1 and error.startswith("error: ") and error.count("\n") == 1, (pages, code, error)
        assert "No space left on device" in error, (pages, error)
    assert found["left"] == []
    assert found["events"][-3:] == ["checkpoint step-4", "checkpoint step-6", "finished after step 6"]


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Within the block files of this process stop growing at `size` bytes, in the middle of a line."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refused(attempt) -> None:
    with pytest.raises(UndertowError, match=r"cannot be written \(File too large\)") as caught:
        attempt()
    assert caught.value.exit_code == 1


def test_events_that_find_no_room(tmp_path):
    run = RunDirectory(tmp_path)
    run.note("started")
    with no_file_beyond(50):
        refused(lambda: run.note("checkpoint step-2"))
    run.note("resumed")
    lines = (tmp_path / "events.log").read_text().splitlines()
    assert (lines[0].split("  ")[1], lines[-1].split("  ")[1]) == ("started", "resumed") and len(lines) == 3


def test_event_files_that_find_no_room(tmp_path):
    (tracker,) = open_trackers(["tensorboard"], tmp_path, {}, 0)
    with no_file_beyond(200):
        for step in (1, 2):
            tracker.write({"step": step, "time": 1.0, "train/loss": step / 2})
        refused(lambda: [tracker.write({"step": 3, "time": 1.0, "train/loss": 1.5}) for _ in range(5)])
        tracker.close()
    (tracker,) = open_trackers(["tensorboard"], tmp_path, {}, 2)
    tracker.write({"step": 3, "time": 1.0, "train/loss": 7.5})
    tracker.close()
    assert shown(tmp_path / "tensorboard") == {"train/loss": [(1, 0.5), (2, 1.0), (3, 7.5)]}


def test_metrics_that_find_no_room(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, 0)
    with no_file_beyond(50):
        metrics.write({"step": 1, "train/loss": 0.5})
        refused(lambda: metrics.write({"step": 2, "train/loss": 1.0}))
        metrics.close()
    assert [entry["step"] for entry in read_metrics(path)] == [1]
    with no_file_beyond(20):
        refused(lambda: MetricsFile(path, 1))
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]
    again = MetricsFile(path, 1)
    again.write({"step": 2, "train/loss": 1.0})
    again.close()
    assert [entry["step"] for entry in read_metrics(path)] == [1, 2]
