"""Calibration files: the shipped one, a round trip, and every way in which a user's may be wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from undertow.cli import main
from undertow.config.errors import ConfigError, InputError
from undertow.config.gpus import Gpu
from undertow.planner.calibration.file import (
    calibration_document,
    read_calibration,
    read_measurements,
    shipped_calibration,
    write_calibration,
)
from undertow.planner.calibration.fit import fit, fit_calibration
from undertow.planner.calibration.text import calibration_text

SHIPPED = shipped_calibration()
DOCUMENT = calibration_document(SHIPPED)


def written(tmp_path: Path, **changes) -> Path:
    """The shipped file with fields replaced, or left out where None."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({key: value for key, value in {**DOCUMENT, **changes}.items() if value is not None}))
    return path


def test_the_shipped_file():
    measured = SHIPPED.measured
    assert (measured.gpu.name, measured.preset, measured.config.indexer) == ("MI355X", "v4-flash", "own_rank")
    assert measured.frozen_indexer and measured.implementation == "primus" and measured.transfer_seconds == 0
    assert (measured.geometry.data, measured.geometry.expert, measured.geometry.expert_data) == (8, 8, 1)
    assert (measured.date, measured.commit) == ("unknown", "unknown")
    core = {kind: (each.forward.value, each.backward.value) for kind, each in SHIPPED.rates.core.items()}
    assert core == {"swa": (0.20, 0.67), "csa": (0.53, 2.55), "hca": (0.22, 0.78)}
    assert [row.peak_bytes for row in SHIPPED.rows] == [
        217_200_000_000,
        225_900_000_000,
        260_900_000_000,
        260_900_000_000,
    ]
    assert [row.microbatches for row in SHIPPED.rows] == [32] * 4
    assert SHIPPED.warnings == ()


def test_the_shipped_fit_is_that_of_its_rows():
    assert fit(SHIPPED.measured) == SHIPPED
    assert (SHIPPED.rates.matrix_tflops.value, SHIPPED.rates.head_tflops.value) == (388.87, 1045.69)
    assert SHIPPED.constant == 10_838_000_000
    assert all(abs(each.seconds or 1) < 6e-4 and abs(each.peak_bytes or 1) < 0.01 for each in SHIPPED.errors)


def test_a_round_trip(tmp_path):
    path = tmp_path / "again.json"
    write_calibration(SHIPPED, path)
    assert read_calibration(path) == SHIPPED and json.loads(path.read_text()) == DOCUMENT
    assert [each.name for each in tmp_path.iterdir()] == ["again.json"]
    with pytest.raises(InputError, match="cannot be written"):
        write_calibration(SHIPPED, tmp_path / "none" / "x.json")


def test_measurements_need_no_fit_and_little_else(tmp_path):
    rows = [{"layout": "Et*43mL", "microbatches": 4, "seconds": 9.0}]
    left_out = dict.fromkeys(
        (
            "format",
            "name",
            "source",
            "date",
            "commit",
            "attention_core_ms",
            "fitted",
            "tensor",
            "context",
            "micro_batch",
        )
    )
    path = written(tmp_path, **left_out, rows=rows, gpus=8, pipeline=1)
    measured = read_measurements(path)
    assert (measured.name, measured.source, measured.date) == ("mine", "not given", "unknown")
    assert (measured.rows[0].recompute, measured.rows[0].schedule, measured.rows[0].peak_bytes) == (
        "none",
        "1f1b",
        None,
    )
    assert measured.core == {} and measured.geometry.data == 8
    with pytest.raises(
        ConfigError, match=r"mine.json: fitted is missing, these are measurements alone; fit them first"
    ):
        read_calibration(path)


def test_a_gpu_of_ones_own(tmp_path):
    own = Gpu("Z1", "unknown", 0, 500 * 10**9, 9e12, 2e15, 4e15, 9e11, 0, "ocp")
    path = written(tmp_path, gpu="Z1")
    assert read_calibration(path, (own,)).measured.gpu == own
    with pytest.raises(ConfigError, match=r'mine.json: gpu is "Z1"; allowed: MI300X, '):
        read_calibration(path)


ROW = DOCUMENT["rows"][0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format is 2; allowed: a whole number from 1 to 1"),
        ({"name": 3}, "name is 3; allowed: a line of text, 500 characters at most"),
        ({"name": "a\nb"}, 'name is "a\\nb"; allowed: a line of text'),
        ({"gpu": "MI35X"}, 'gpu is "MI35X"; allowed: MI300X, MI308X'),
        ({"gpus": 0}, "gpus is 0; allowed: a whole number from 1 to 1,000,000"),
        ({"gpus": 31}, "31 GPUs are not a multiple of tensor 1 x pipeline 4"),
        ({"model": "v4-flash"}, 'model is "v4-flash"; allowed: an object with named fields'),
        ({"model": {"preset": "v4-flsh"}}, 'model.preset is "v4-flsh"; allowed: '),
        ({"model": {"preset": "v4-flash", "indxer": "shared"}}, "unknown"),
        ({"frozen_indexer": 1}, "frozen_indexer is 1; allowed: true or false"),
        ({"sequence_length": 4096.5}, "sequence_length is 4096.5; allowed: a whole number from 1 to"),
        ({"sequence_length": True}, "sequence_length is true; allowed: a whole number"),
        ({"implementation": "fast"}, 'implementation is "fast"; allowed: tight, primus, reference'),
        ({"state": "fp7"}, 'state is "fp7"; allowed: published-fp32, '),
        ({"transfer_seconds": -1}, "transfer_seconds is -1; allowed: a number from 0 to 60"),
        ({"attention_core_ms": {"origin": "x"}}, "attention_core_ms.csa is missing; allowed: an object"),
        (
            {"attention_core_ms": {**DOCUMENT["attention_core_ms"], "hca": {"forward": 0, "backward": 1}}},
            "attention_core_ms.hca.forward is 0; allowed: a number above 0",
        ),
        ({"saved_bytes": {"csa": 1.5}}, "saved_bytes.csa is 1.5; allowed: a whole number"),
        ({"saved_bytes": {"csb": 1}}, "saved_bytes.csb is no field of a calibration"),
        ({"rows": []}, "rows is a list of 0; allowed: a list of 1 to 1,000 objects"),
        ({"rows": [7]}, "rows[0] is 7; allowed: an object with named fields"),
        ({"rows": [{**ROW, "layout": "Et*10|q"}]}, "rows[0]: layout 'Et*10|q', column 7: 'q' is none of"),
        ({"rows": [{**ROW, "layout": "Et*43mL"}]}, "rows[0]: layout 'Et*43mL'"),
        ({"rows": [{**ROW, "recompute": "99"}]}, "rows[0]: recompute '99': layer 99 is none of this model's"),
        ({"rows": [{**ROW, "schedule": "gpipe"}]}, 'rows[0].schedule is "gpipe"; allowed: 1f1b, '),
        ({"rows": [{**ROW, "microbatches": 0}]}, "rows[0].microbatches is 0; allowed: a whole number from 1"),
        ({"rows": [{**ROW, "seconds": 0}]}, "rows[0].seconds is 0; allowed: a number above 0"),
        ({"rows": [{**ROW, "seconds": "8"}]}, 'rows[0].seconds is "8"; allowed: a number above 0'),
        (
            {"rows": [{**ROW, "peak_bytes": 289 * 10**9}]},
            "rows[0].peak_bytes is 289000000000; allowed: a whole number from 1 to 288,000,000,000",
        ),
        ({"rows": [{**ROW, "seconds": None, "peak_bytes": None}]}, "rows[0] has neither seconds nor peak_bytes"),
        ({"rows": [{**ROW, "second": 1}]}, "rows[0].second is no field of a calibration; did you mean 'seconds'?"),
        ({"rows": [ROW, ROW]}, "fitted.errors is a list of 4; allowed: one entry for each of the 2 rows"),
        (
            {"fitted": {**DOCUMENT["fitted"], "matrix_tflops": -1}},
            "fitted.matrix_tflops is -1; allowed: a number above",
        ),
        ({"fitted": {**DOCUMENT["fitted"], "mark": "guessed"}}, 'fitted.mark is "guessed"; allowed: fitted, scaled'),
        ({"commnt": "x"}, "commnt is no field of a calibration; did you mean 'commit'?"),
    ],
)
def test_mistakes(tmp_path, changes, message):
    with pytest.raises(ConfigError) as caught:
        read_calibration(written(tmp_path, **changes))
    told = str(caught.value)
    assert message in told and told.startswith(str(tmp_path)) and "\n" not in told


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "line 1, column 2: no JSON"),
        (b"[]", "the file is a list of 0; allowed: an object"),
        (b'{"gpus": NaN}', "NaN is no number that can be measured"),
        (b'{"gpus": 1, "gpus": 2}', "field 'gpus' stands there twice"),
        (b"\xff", "byte 0 is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b" " * (1 << 21), "larger than 1,048,576 bytes"),
    ],
)
def test_files_that_are_none(tmp_path, content, message):
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_calibration(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_calibration(tmp_path / "other.json")


def test_a_constant_below_the_heap_is_refused(tmp_path):
    document = json.loads(written(tmp_path).read_text())
    document["fitted"]["constant_bytes"] = 1
    (tmp_path / "mine.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"mine\.json: calibration .* the symmetric heap alone is 3\.56 GB"):
        read_calibration(tmp_path / "mine.json")


def test_the_table_names_the_worst_row():
    text = calibration_text(SHIPPED).splitlines()
    assert text[0] == "calibration mi355x-v4-flash: v4-flash on 32xMI355X, implementation primus"
    assert text[1] == "  388.87 TFLOP/s of matrices, 1,045.69 of logits (fitted)"
    assert text[2] == (
        "  10.838 GB of constant memory, at worst 0.89% off: 'Et*10|t*11|t*11|t*11mL, recompute first:3'"
    )
    assert text[4].split()[:6] == ["10.096", "10.091", "-0.06%", "217.2", "215.27", "-0.89%"]
    assert len(text) == 8


def test_the_command_line_fits_writes_and_plans(tmp_path, capsys):
    path, words = written(tmp_path, fitted=None), ["model.indexer=own_rank", "indexer.frozen=true"]
    base = ["plan", "v4-flash", "--gpus", "32xMI355X"]
    assert main([*base, "--calibrate", str(path), *words]) == 0
    done, target = capsys.readouterr(), tmp_path / "mine.calibration.json"
    assert "at worst 0.89% off" in done.err and "time, by rates mi355x-v4-flash" in done.out
    assert read_calibration(target) == SHIPPED
    assert main([*base, "--calibration", str(target), *words]) == 0
    again = capsys.readouterr()
    assert again.out == done.out and again.err == ""
    assert main([*base, "--calibrate", str(path), "--calibration", str(target)]) == 2
    assert "both name one; give one of them" in capsys.readouterr().err


def test_the_example_of_the_documentation(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "calibrate.md").read_text(encoding="utf-8")
    example = re.search(r"```json\n(.*?)```", page, re.DOTALL)
    assert example
    (tmp_path / "mine.json").write_text(example[1])
    found = fit_calibration(tmp_path / "mine.json")
    assert found.name == "h200-flash" and found.warnings == () and found.constant == 4_430_000_000
    assert (found.rates.matrix_tflops.value, found.rates.head_tflops.value) == (139.77, 327.73)
    write_calibration(found, tmp_path / "out.json")
    assert read_calibration(tmp_path / "out.json") == found
