"""What trackers are given: every number once, also after a resume."""

import math
import sys
from pathlib import Path

import pytest

from tests.train.events import START, records, shown
from undertow.config.errors import InputError
from undertow.train.tracking import open_trackers, refuse_missing


def write(run: Path, after: int, steps: int, shift: float = 0.0) -> None:
    (tracker,) = open_trackers(["tensorboard"], run, {}, after)
    for step in range(after + 1, steps + 1):
        tracker.write({"step": step, "time": 100.5 + step, "train/loss": step + 0.5 + shift, "eval/loss": None})
    tracker.close()


def test_values_steps_and_times(tmp_path):
    (tracker,) = open_trackers(["tensorboard"], tmp_path, {}, 0)
    tracker.write({"step": 1, "time": 123.25, "tokens": 96, "train/loss": 0.5, "eval/loss": None, "culprit": "head"})
    tracker.write({"step": 2, "time": 124.5, "tokens": 192, "train/loss": math.nan, "eval/loss": 4.0})
    first, start, one, two = records(tmp_path / "tensorboard")
    assert first.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (1, START)
    assert {v.tag: v.simple_value for v in one.summary.value} == {"tokens": 96.0, "train/loss": 0.5}
    assert [(e.step, e.wall_time) for e in (one, two)] == [(1, 123.25), (2, 124.5)]
    assert [v.tag for v in two.summary.value] == ["tokens", "train/loss", "eval/loss"]
    assert math.isnan(two.summary.value[1].simple_value)
    tracker.close()


def test_a_resumed_run_shows_each_step_once(tmp_path):
    folder = tmp_path / "tensorboard"
    write(tmp_path, 0, 5)
    write(tmp_path, 2, 4, shift=10)
    write(tmp_path, 2, 6, shift=20)  # within a second, as the one before
    assert shown(folder) == {"train/loss": [(1, 1.5), (2, 2.5), (3, 23.5), (4, 24.5), (5, 25.5), (6, 26.5)]}


def test_tensorboard_itself_reads_them_so(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write(tmp_path, 0, 5)
    write(tmp_path, 2, 6, shift=20)
    reader = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert reader.Tags()["scalars"] == ["train/loss"]
    points = [(e.step, e.value, e.wall_time) for e in reader.Scalars("train/loss")]
    assert points == [(1, 1.5, 101.5), (2, 2.5, 102.5), *((s, s + 20.5, s + 100.5) for s in (3, 4, 5, 6))]


def test_a_torn_record_of_a_killed_run_harms_nothing(tmp_path):
    write(tmp_path, 0, 3)
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    write(tmp_path, 2, 3, shift=7)
    assert shown(tmp_path / "tensorboard")["train/loss"] == [(1, 1.5), (2, 2.5), (3, 10.5)]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_package_is_one_line_with_the_extra(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    for attempt in (lambda: refuse_missing([name]), lambda: open_trackers(["tensorboard", name], tmp_path, {}, 0)):
        with pytest.raises(
            InputError, match=rf"tracking {name}: .* is not installed; pip install 'undertow\[{name}\]'"
        ):
            attempt()
    assert list(tmp_path.iterdir()) == [], "refused before anything is written"


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "tensorboard").touch()
    with pytest.raises(InputError, match=r"tensorboard: cannot be written \(File exists\); .*leave tensorboard out"):
        open_trackers(["tensorboard"], tmp_path, {}, 0)


def test_without_names_there_is_none(tmp_path):
    assert open_trackers([], tmp_path, {}, 0) == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_goes_on_under_one_identity(tmp_path, monkeypatch, name):
    pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    seen = set()
    for after in (0, 2):
        (tracker,) = open_trackers([name], tmp_path, {"train": {"steps": after}}, after)
        for step in range(after + 1, 5):
            tracker.write({"step": step, "time": 1.0, "train/loss": 0.5 * step, "eval/loss": None})
        tracker.close()
        seen.add((tmp_path / "tracking-id").read_text())
    assert len(seen) == 1 and len(seen.pop()) == 9
