"""What a run directory says of where its run comes from."""

import json

import pytest

from undertow.config.dump import to_yaml
from undertow.config.errors import InputError
from undertow.config.resolve import resolve
from undertow.report.origin import origin

EVENTS = """2026-11-30T08:00:00+00:00  started
2026-11-30T08:10:00+00:00  checkpoint step-80
2026-11-30T10:00:00+00:00  resumed from step-80
2026-11-30T10:05:00+00:00  finis"""
MACHINE = {
    "versions": {"undertow": "0.1.0", "python": "3.11.7", "torch": "2.13.0+cpu", "numpy": "2.4.6"},
    "devices": [{"device": "cpu", "name": "2 cores"}, {"device": "cuda:0", "name": "NVIDIA H200"}],
    "commit": "bcbb4a2",
    "device": "cuda",
}


def rows(run, metrics=()) -> dict[str, str]:
    return {row.name: row.value for row in origin(run, metrics)}


def test_of_the_configuration(tmp_path):
    resolved = resolve("pretrain/quickstart", ["seed=3", 'out="a # b"', "device=cpu"], {"UNDERTOW__TRAIN__STEPS": "5"})
    (tmp_path / "config.yaml").write_text(to_yaml(resolved))
    told = rows(tmp_path)
    assert told.pop("recipe").endswith("recipes/pretrain/quickstart.yaml")
    assert told == {
        "model": "v4-tiny: 4 layers of width 128",
        "data": "plays",
        "tokenizer": "small-bpe",
        "optimizer": "muon",
        "type of the weights": "float32",
        "seed": "3",
    }
    assert origin(tmp_path, [])[0].note == 'Set outside of it: train.steps=5, device=cpu, seed=3, out="a # b".'


def test_of_the_machine(tmp_path):
    (tmp_path / "environment.json").write_text(json.dumps(MACHINE))
    assert rows(tmp_path) == {
        "device": "cuda, NVIDIA H200",
        "versions": "undertow 0.1.0, torch 2.13.0+cpu, python 3.11.7",
        "commit": "bcbb4a2",
    }
    (tmp_path / "environment.json").write_text(json.dumps({"device": "cpu", "commit": None}))
    assert rows(tmp_path) == {"device": "cpu"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"device": "cpu", "devices": 3}', "\x00"])
def test_a_damaged_environment_is_named(tmp_path, text):
    (tmp_path / "environment.json").write_text(text)
    with pytest.raises(InputError, match=r"environment\.json: damaged"):
        origin(tmp_path, [])


def test_of_the_events(tmp_path):
    (tmp_path / "events.log").write_text(f"cut sho\n{EVENTS}")
    # The last sign of life: 12 minutes after the start, 6 minutes after the resumption, both from the metrics.
    metrics = [{"step": n, "time": 1796025600.0 + 60 * minutes} for n, minutes in ((1, 1), (80, 12), (81, 126))]
    assert rows(tmp_path, [*metrics, {"step": 82, "time": None}, {"step": 83}]) == {
        "begun": "2026-11-30 08:00:00 UTC",
        "last event": "2026-11-30 10:05:00 UTC: finis",
        "resumptions": "1",
        "wall time": "18 min 00 s",
    }
    assert rows(tmp_path)["wall time"] == "15 min 00 s"


def test_missing_files_tell_nothing(tmp_path):
    assert origin(tmp_path, [{"step": 1, "time": 1.0}]) == []
    (tmp_path / "events.log").write_text("nothing with a time\n")
    assert origin(tmp_path, []) == []
