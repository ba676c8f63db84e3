"""Who may use a run directory, and what lies in it."""

import json
import os
from pathlib import Path

import pytest
import torch

from undertow.config.errors import InputError, UndertowError
from undertow.config.resolve import resolve
from undertow.train.metrics import MetricsFile, read_metrics
from undertow.train.run import RunDirectory


def claimed(path: Path, resume: bool = False) -> Path | None:
    """What a run that ends at once is given to go on from."""
    with RunDirectory(path).claim(resume) as checkpoint:
        return checkpoint


def test_a_new_or_empty_directory_is_free(tmp_path):
    assert claimed(tmp_path / "a" / "new") is None
    assert claimed(tmp_path / "a", resume=True) is None
    assert [p.name for p in tmp_path.rglob("*")] == ["a"], "what was made and not used goes again"


def test_a_file_or_foreign_directory_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match=r"is not empty and holds no run; .*out=DIR"):
        claimed(tmp_path, resume=True)
    with pytest.raises(InputError, match=r"thesis\.txt: is a file"):
        claimed(tmp_path / "thesis.txt")


def test_a_run_is_refused_without_resume_and_begun_again_with_it(tmp_path, recipe):
    run = RunDirectory(tmp_path / "run")
    run.describe(recipe(tmp_path / "run"), {}, torch.device("cpu"), 0)
    with pytest.raises(InputError, match=r"holds a run \(no checkpoint yet\); go on with --resume auto"):
        claimed(run.path)
    assert claimed(run.path, resume=True) is None


def test_one_killed_before_it_described_itself_is_begun_anew(tmp_path):
    for name in (".lock", ".config.yaml.writing"):
        (tmp_path / name).write_text("half")
    assert claimed(tmp_path) is None


def test_a_run_at_work_is_refused_with_its_process(tmp_path, recipe):
    run = RunDirectory(tmp_path / "run")
    with run.claim(resume=False):
        run.describe(recipe(run.path), {}, torch.device("cpu"), 0)
        with pytest.raises(InputError, match=rf"run: process {os.getpid()} on \S+ is at work there; .*out=DIR"):
            claimed(run.path, resume=True)
    assert claimed(run.path, resume=True) is None
    assert not (run.path / ".lock").exists()


def test_an_event_after_a_torn_line_stands_on_its_own(tmp_path):
    (tmp_path / "events.log").write_bytes(b"2026-01-01  started\n2026-01-01  che")
    RunDirectory(tmp_path).note("failed")
    RunDirectory(tmp_path).note("again")
    lines = (tmp_path / "events.log").read_text().splitlines()
    assert lines[:2] == ["2026-01-01  started", "2026-01-01  che"]
    assert [line.split("  ")[1] for line in lines[2:]] == ["failed", "again"]


def test_description(tmp_path, recipe):
    run = RunDirectory(tmp_path / "run")
    run.describe(recipe(tmp_path / "run", "train.steps=5"), {"versions": {"torch": "1"}}, torch.device("cpu"), 0)
    again = resolve(run.path / "config.yaml", [], {})
    assert again.config == recipe(tmp_path / "run", "train.steps=5").config
    environment = json.loads((run.path / "environment.json").read_text())
    assert environment["versions"] == {"torch": "1"}
    assert (environment["device"], environment["threads"]) == ("cpu", torch.get_num_threads())
    run.note("started")
    run.note("finished")
    lines = (run.path / "events.log").read_text().splitlines()
    assert [line.split("  ")[1] for line in lines] == ["started", "finished"]


def test_a_configuration_that_changes_on_the_way_is_kept(tmp_path, recipe):
    run = RunDirectory(tmp_path / "run")
    for step, change in ((0, "train.steps=5"), (3, "train.steps=5"), (4, "train.steps=9")):
        run.describe(recipe(run.path, change), {}, torch.device("cpu"), step)
    assert sorted(path.name for path in run.path.iterdir()) == [
        *("config.until-step-4.yaml", "config.yaml", "environment.json")
    ]
    assert resolve(run.path / "config.until-step-4.yaml", [], {}).config.train.steps == 5
    assert resolve(run.path / "config.yaml", [], {}).config.train.steps == 9


@pytest.mark.parametrize("change", ["removed", "renamed"])
def test_metrics_of_a_directory_that_went_away_are_an_error(tmp_path, change):
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    metrics = MetricsFile(path, 0)
    metrics.write({"step": 1})
    if change == "removed":
        path.unlink()
    else:
        path.parent.rename(tmp_path / "other")
    with pytest.raises(UndertowError, match=r"metrics\.jsonl: was removed or renamed while the run is at work"):
        metrics.write({"step": 2})
    metrics.close()


@pytest.mark.parametrize(("lines", "step"), [("1 1", 1), ("1 3 2", 2), ("-5", -5), ("0", 0), ("9" * 400, "9" * 400)])
def test_steps_that_do_not_ascend_name_their_line(tmp_path, lines, step):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {n}}}\n' for n in lines.split()))
    with pytest.raises(InputError, match=rf"line {len(lines.split())}: damaged: step {step} after step"):
        list(read_metrics(path))


def test_a_whole_last_line_without_its_end_counts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    MetricsFile(path, 2).close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_metrics_keep_each_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, 0)
    for step in (1, 2, 3):
        first.write({"step": step, "loss": 0.1 * step})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # as a killed run leaves it
    second = MetricsFile(path, 2)
    second.write({"step": 3, "loss": 7})
    second.close()
    assert list(read_metrics(path)) == [{"step": 1, "loss": 0.1}, {"step": 2, "loss": 0.2}, {"step": 3, "loss": 7}]


@pytest.mark.parametrize("line", [b"garbage", b"\0\0", b"\xff\xfe", b"{}", b"[]", b'{"step": "2"}', b"[" * 100_000])
def test_damaged_metrics_name_the_line(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    held = b'{"step": 1}\n' + line + b"\n"
    path.write_bytes(held)
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 2: damaged: .*; remove the line"):
        MetricsFile(path, 1)
    assert path.read_bytes() == held


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.log"])
def test_a_directory_in_the_place_of_a_file(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=rf"{name}: cannot be (read|written) \(Is a directory\)"):
        MetricsFile(tmp_path / name, 0) if name == "metrics.jsonl" else RunDirectory(tmp_path).note("started")
