"""Calibrations from results of the bench: rates and their rows, what has none, the file, the command, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import undertow
from undertow.cli import main
from undertow.config.errors import ConfigError
from undertow.config.gpus import Gpu
from undertow.ops.registry import BACKENDS
from undertow.planner.calibration.file import calibration_document, read_calibration, write_calibration
from undertow.planner.calibration.operators import OWN_WAYS
from undertow.planner.calibration.sources import calibrate
from undertow.planner.timing.operators import MOVERS, PRODUCTS, UPDATES

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
ATTENTION = {"swa": 67_654_123_520, "hca": 75_979_816_960, "csa": 273_745_444_864}


def row(op: str, shape: str, ms: float, size: float = 0, operations: float = 0, way: str = "triton") -> dict[str, Any]:
    """A row of a result file that was found right."""
    median = {"median": ms, "lowest": ms, "highest": ms}
    return {
        "op": op,
        "shape": shape,
        "way": way,
        "status": "ok",
        "ms": median,
        "bytes": size,
        "flops_exact": operations,
    }


def experts(rows: int, count: int, rate: float) -> list[dict[str, Any]]:
    """Both products of experts in all ways, in the time that a rate of operations gives."""
    ways = ("forward", "gradient of rows", "gradient of weights")
    sizes = {"fc1": (4096, 4096), "fc2": (2048, 4096)}
    work = {name: (f"{rows} rows of {count} experts, {a} to {b}", 2 * rows * a * b) for name, (a, b) in sizes.items()}
    return [
        row(f"{name} {way}", shape, 1e3 * operations / rate, 1, operations)
        for name, (shape, operations) in work.items()
        for way in ways
    ]


def everything() -> list[dict[str, Any]]:
    """A row for all that a plan is timed by: products at 500 TFLOP/s, copies at 2 TB/s."""
    rows = [row(name, "x", 4.0, 1e9, 2e12) for name in PRODUCTS[1:]]
    rows += [row(name, "x", 0.5, 1e9) for name in MOVERS if name != "copy"]
    for kind, operations in ATTENTION.items():
        rows += [row(f"{kind} {way}", "4096 tokens, 64 x 512", ms, 1, operations) for way, ms in
                 (("forward", 1.0), ("backward", 2.5))]  # fmt: skip
    rows += experts(24576, 32, 6e14) + experts(24576, 256, 3e14)
    rows += [row(f"adamw with {width} state", "1000000 elements", 0.01, 1) for width in ("fp32", "bf16")]
    return rows + [
        row(f"muon with {width} state", "16 experts of 2 x 2048 x 4096", 40.0, 1) for width in ("fp32", "bf16")
    ]


def bench(tmp_path: Path, rows: list[dict[str, Any]], name: str = "ops.json", **changes: Any) -> Path:
    """A result file of `undertow bench kernels`."""
    path = tmp_path / name
    document = {
        "kind": "kernels",
        "environment": {"gpu": "NVIDIA H200", "date": "2026-11-30", "commit": "1a2b3c4"},
        "ceilings": {"copy": 4e12, "matmul": 7e14},
        "rows": rows,
    }
    path.write_text(json.dumps(document | changes))
    return path


def test_every_rate_has_its_row(tmp_path):
    found = calibrate([bench(tmp_path, everything())])
    rates = found.rates.operators
    assert rates is not None
    assert {name for name, each in rates.rates.items() if each.mark == "measured"} == {*PRODUCTS, *MOVERS, *UPDATES}
    assert rates.rates["loss with gradients"].value == 5e14 and rates.rates["norm forward"].value == 2e12
    assert rates.rates["norm forward"].source == "ops.json: norm forward, x, triton, 0.5 ms"
    assert rates.rates["matmul"].value == 7e14 and rates.rates["matmul"].source == "ops.json: ceilings.matmul"
    assert rates.rates["adamw with bf16 state"].value == pytest.approx(1e11)
    assert rates.rates["muon with bf16 state"].value == pytest.approx(16 * 2 * 2048 * 4096 / 0.04)
    assert {per: each["gradient of rows"].value for per, each in rates.experts.items()} == pytest.approx(
        {768.0: 6e14, 96.0: 3e14}
    )
    assert "fc1 forward, 24576 rows of 32" in rates.experts[768.0]["forward"].source
    assert "; ops.json: fc2 forward" in rates.experts[768.0]["forward"].source
    csa = found.measured.core["csa"]
    assert (csa.forward.value, csa.backward.value, csa.operations) == (1.0, 2.5, ATTENTION["csa"])
    assert (found.measured.date, found.measured.commit, found.measured.sequence_length) == (
        "2026-11-30",
        "1a2b3c4",
        4096,
    )
    assert (found.constant, found.rows) == (None, ())
    assert found.warnings == ("dense products have no rows of their own: at the rate of one large product",)


def test_a_round_trip(tmp_path):
    found = calibrate([bench(tmp_path, [*everything(), row("top-k", "4096 tokens", 0.02, 1)])])
    path = tmp_path / "again.json"
    write_calibration(found, path)
    assert read_calibration(path) == found
    document = json.loads(path.read_text())
    assert document == calibration_document(found) and document["kind"] == "operators"
    assert document["unused"] == ["ops.json: top-k, 4096 tokens, triton, 0.02 ms"]
    assert document["rates"]["swiglu forward"] == {
        "value": 2e12, "unit": "bytes a second", "mark": "measured",
        "source": "ops.json: swiglu forward, x, triton, 0.5 ms",
    }  # fmt: skip


def test_the_published_results_of_attention_alone():
    path = RESULTS / "attention_gpu.json"
    rows = {(r["op"], r["shape"]): r for r in json.loads(path.read_text())["rows"] if r["way"] == "triton"}
    found = calibrate([path])
    for kind, operations in ATTENTION.items():
        core = found.measured.core[kind]
        assert core.forward.value == rows[f"{kind} forward", "4096 tokens, 64 x 512"]["ms"]["median"]
        assert core.backward.value == rows[f"{kind} backward", "4096 tokens, 64 x 512"]["ms"]["median"]
        assert core.operations == operations
    rates = found.rates.operators
    assert rates is not None and rates.experts == {} and rates.rates["norm forward"].mark == "ceiling"
    assert rates.rates["distillation forward"].mark == "measured"
    told = " ".join(found.warnings)
    assert "no rows of experts (fc1, fc2): at the rate of one large product" in told
    assert "no row of adamw with fp32 state" in told and "norm forward" in told
    assert any("csa forward, 16384 tokens" in each for each in rates.unused)


def test_what_has_no_row_is_told(tmp_path):
    rows = [each for each in everything() if not each["op"].startswith(("swa", "hyper", "fc1", "muon"))]
    nothing = {"bytes": 0, "flops_exact": 0}  # says nothing of a rate
    rows += [each | nothing for each in everything() if each["op"].startswith(("swa", "hyper in", "fc1"))]
    found = calibrate([bench(tmp_path, rows)])
    assert found.measured.core["swa"].forward.mark == "scaled"
    assert found.measured.core["swa"].forward.value == pytest.approx(0.20 * 2516.6 / 989.4)
    assert found.warnings[1:] == (
        "attention of swa has no row: it keeps the shipped times, in proportion to the peak",
        "no row of hyper in forward, hyper in backward, hyper out forward, hyper out backward: at the rate of a large "
        "copy, which is quicker than they are",
        "no rows of experts (fc1, fc2): at the rate of one large product, which is quicker than they are",
        "no row of muon with fp32 state, muon with bf16 state: a step of the optimizer with such state is not counted",
    )
    rates = found.rates.operators
    assert rates is not None and rates.rates["hyper in forward"].value == 4e12


def test_several_files_the_later_wins_and_ways(tmp_path):
    assert OWN_WAYS == BACKENDS
    first = bench(tmp_path, everything(), "a.json")
    rows = [
        row("norm forward", "x", 0.25, 1e9),
        row("norm backward", "x", 0.01, 1e9, way="torch"),
        row("rotary forward", "x", 9.0, 1e9, way="reference"),
        {"op": "rotary backward", "shape": "x", "way": "triton", "status": "wrong", "error": 1.0},
        row("swiglu forward", "larger", 1.0, 3e9),
    ]
    second = bench(tmp_path, rows, "b.json", ceilings={"copy": 5e12, "matmul": 6e14}, deterministic=True)
    found = calibrate([first, second])
    rates = found.rates.operators
    assert rates is not None
    assert rates.rates["norm forward"].value == 4e12  # of the later file
    assert rates.rates["norm backward"].value == 2e12  # peers do not count
    assert rates.rates["rotary forward"].value == pytest.approx(1e9 / 9e-3)
    assert rates.rates["rotary backward"].value == 2e12  # nor does what is wrong
    assert rates.rates["swiglu forward"].value == 3e12  # of the larger shape
    assert (rates.rates["copy"].value, rates.rates["matmul"].value) == (5e12, 7e14)
    assert found.name == "a+b" and found.measured.source == "undertow bench kernels: a.json, b.json"
    assert "rotary forward, x: no kernel was measured, the row is the reference's" in found.warnings
    assert "b.json was measured with deterministic results, which may take longer" in found.warnings


def test_mistakes(tmp_path):
    def told(*paths: Path, own: tuple[Gpu, ...] = ()) -> str:
        with pytest.raises(ConfigError) as caught:
            calibrate(list(paths), own)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    good = bench(tmp_path, everything(), "good.json")
    assert "measured on a CPU; a calibration is of a GPU" in told(bench(tmp_path, [], environment={"gpu": None}))
    other = {"gpu": "NVIDIA Z1", "date": "2026-11-30"}
    assert "measured on NVIDIA Z1, which is no GPU of the catalogue" in told(bench(tmp_path, [], environment=other))
    aside = bench(tmp_path, everything(), "aside.json", device="cpu")
    assert "aside.json: measured with --device cpu; a calibration is of a GPU" in told(aside)
    own = Gpu("Z1", "unknown", 0, 500 * 10**9, 9e12, 2e15, 4e15, 9e11, 0, "ocp")
    mine = bench(tmp_path, everything(), "mine.json", environment=other)
    assert calibrate([mine], (own,)).measured.gpu == own
    assert "mine.json: measured on Z1, good.json on H200; a calibration is of one GPU" in told(good, mine, own=(own,))
    step = bench(tmp_path, [], kind="step")
    assert "its kind is 'step'; --calibrate takes measured runs, or results of undertow bench kernels" in told(step)
    runs = tmp_path / "runs.json"
    runs.write_text('{"name": "x"}')
    assert "runs.json: holds measured runs, which make a calibration alone" in told(good, runs)
    assert "rows[0].ms.median is missing" in told(bench(tmp_path, [everything()[0] | {"ms": {}}]))
    assert "ceilings.copy is 0; allowed: a number above 0" in told(
        bench(tmp_path, everything(), ceilings={"copy": 0, "matmul": 1e14})
    )
    apart = [row("swa forward", "128 tokens, x", 1, 1, 1), row("swa backward", "128 tokens, x", 1, 1, 1)]
    assert "attention of swa, csa, hca layers was measured at no common length" in told(
        bench(tmp_path, [*(each for each in everything() if not each["op"].startswith("swa")), *apart])
    )


@pytest.mark.parametrize(
    ("changed", "rate"),
    [
        (row("norm forward", "x", 1e-9, 1e15), "1e+27"),
        (row("norm forward", "x", 1e7, 1e-300), "1e-304"),
        (row("loss with gradients", "x", 1.0, 1, 1e12), "1e+15"),  # an H200 does 989 TFLOP/s
        (row("swa backward", "4096 tokens, 64 x 512", 1e-320, 1, 1), "inf"),
        (row("adamw with bf16 state", "0 elements", 1.0), "0"),
        (row("muon with bf16 state", "4 experts of 0 x 1 x 1", 1.0), "0"),
    ],
)
def test_rates_that_no_gpu_has(tmp_path, changed, rate):
    """None reaches a file that could not be read again, or a plan of no or of infinite seconds."""
    rows = [each for each in everything() if each["op"] != changed["op"]]
    with pytest.raises(ConfigError) as caught:
        calibrate([bench(tmp_path, [*rows, changed])])
    assert f"ops.json: {changed['op']}, {changed['shape']}, triton, " in str(caught.value)
    assert f": that is {rate} a second, and H200 does 1e+06 to " in str(caught.value)


@pytest.mark.parametrize("rows", ["0", "9" * 200])
def test_shapes_without_sense_are_not_used(tmp_path, rows):
    """Numbers that no shape has are no number of rows or tokens."""
    odd = [each | {"shape": f"{rows} rows of {rows} experts, 1 to 1"} for each in experts(24576, 32, 6e14)]
    odd += [row(f"swa {way}", f"{rows} tokens, 64 x 512", 1.0, 1, 1e9) for way in ("forward", "backward")]
    found = calibrate([bench(tmp_path, [*everything(), *odd])])
    assert found.rates.operators is not None
    assert list(found.rates.operators.experts) == [768, 96] and found.measured.sequence_length == 4096
    assert len(found.rates.operators.unused) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["rates"].pop("copy"), "rates.copy is missing; allowed: an object"),
        (lambda d: d["rates"]["copy"].update(value=-1), "rates.copy.value is -1; allowed: a number above 1e+06"),
        (lambda d: d["rates"]["matmul"].update(value=1e-320), "rates.matmul.value is 1e-320; allowed: a number above"),
        (lambda d: d["attention_core"]["csa"].update(operations=1), "csa.operations is 1; allowed: a number above"),
        (lambda d: d["experts"][0].update(rows=1e-320), "experts[0].rows is 1e-320; allowed: a number above"),
        (lambda d: d["rates"]["copy"].update(unit="x"), 'rates.copy.unit is "x"; allowed: bytes a second'),
        (lambda d: d["rates"].update(more={}), "rates.more is no field of a calibration"),
        (lambda d: d.update(kind="kernels"), "its kind is 'kernels', and a calibration is of kind 'operators'"),
        (lambda d: d["attention_core"].pop("csa"), "attention_core.csa is missing"),
        (lambda d: d["experts"][0].pop("forward"), "experts[0].forward is missing"),
        (lambda d: d.update(gpu="Z1"), 'gpu is "Z1"; allowed: MI300X'),
    ],
)
def test_files_that_are_wrong(tmp_path, change, message):
    document = calibration_document(calibrate([bench(tmp_path, everything())]))
    change(document)
    (tmp_path / "mine.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError) as caught:
        read_calibration(tmp_path / "mine.json")
    assert message in str(caught.value)


def test_a_plan_on_one_gpu(tmp_path):
    """Seconds of one microbatch are those of the layers, and clipping and the step of the optimizer come once."""
    found = calibrate([bench(tmp_path, everything())])
    plan = undertow.plan("v4-proxy", "1xH200", global_batch=1, state="adamw-bf16", calibration=found)
    times, count = plan.task.times, plan.parameters.total
    once = sum(float(each.step) for each in (*times.blocks, times.head, times.embedding))
    buffers = 32 * 5  # router biases are no parameters
    assert once == pytest.approx((count - buffers) * (1 / 1e11 + 3 * 2 / 4e12), rel=2e-3)
    blocks = sum(float(each.forward) + float(each.backward) for each in (*times.blocks, times.head))
    assert plan.time.seconds_per_iteration == pytest.approx(blocks + once, rel=1e-6)
    assert "clipping, the optimizer's step, sums of gradients" in str(plan)
    again = undertow.plan("v4-proxy", "1xH200", global_batch=4, micro_batch=1, state="adamw-bf16", calibration=found)
    added = 3 * 6 * (count - buffers) / 4e12  # three times gradients of two bytes are added to others
    assert again.time.seconds_per_iteration == pytest.approx(4 * blocks + added + once, rel=2e-3)
    muon = undertow.plan("v4-proxy", "1xH200", global_batch=1, state="muon-bf16", calibration=found)
    assert muon.time.seconds_per_iteration > plan.time.seconds_per_iteration + 0.5


def test_a_plan_keeps_what_operators_do_not_tell(tmp_path):
    found = calibrate([bench(tmp_path, everything())])
    usual = undertow.plan("v4-flash", "64xH200", pipeline=8)
    plan = undertow.plan("v4-flash", "64xH200", pipeline=8, calibration=found)
    assert plan.task.microbatch.implementation == usual.task.microbatch.implementation
    assert plan.task.profile == usual.task.profile and plan.task.times.transfer > 1e-3
    notes = " ".join(plan.uncalibrated)
    assert "launches, waits of the host, residual sums and casts are not counted" in notes
    assert (
        "memory: operators say nothing about it" in notes and "priced by priors, between machines at 50 GB/s" in notes
    )
    other = undertow.plan("v4-pro", "512xMI355X", calibration=found)
    assert "time: operators were measured at the widths of v4-flash; these are others" in other.uncalibrated
    assert "time: rates of MI355X are guessed, 2.54 times H200 by the peak in BF16" in other.uncalibrated
    long = undertow.plan("v4-proxy", "1xH200", sequence_length=16384, global_batch=1, calibration=found).uncalibrated
    assert "time: attention was measured at 4,096 tokens; it is taken by its operations" in long
    assert any("an expert gets 3,072 rows; rates of its products were measured at 768" in note for note in long)


def test_the_command_line(tmp_path, capsys):
    first = bench(tmp_path, [each for each in everything() if each["op"] in MOVERS], "ops.json")
    second = bench(tmp_path, [each for each in everything() if each["op"] not in MOVERS], "attention.json")
    base = ["plan", "v4-proxy", "--gpus", "1xH200", "--global-batch", "1"]
    assert main([*base, "--calibrate", str(first), "--calibrate", str(second)]) == 0
    done, target = capsys.readouterr(), tmp_path / "ops.calibration.json"
    assert "time, by rates ops+attention" in done.out and f"written to {target}" in done.err
    assert "norm forward" in done.err and "ops.json: norm forward, x, triton, 0.5 ms" in done.err
    assert main([*base, "--calibration", str(target)]) == 0
    again = capsys.readouterr()
    assert again.out == done.out and again.err == ""
    assert main([*base, "--html", str(tmp_path / "page.html"), "--calibration", str(target)]) == 0
