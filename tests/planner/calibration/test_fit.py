"""Fits of rates and constants to measured rows: the published ones, a user's, and rows that say too little."""

from __future__ import annotations

from dataclasses import replace

import pytest

import undertow
from undertow.config.errors import ConfigError
from undertow.config.gpus import GPUS
from undertow.config.model import ModelConfig
from undertow.planner.calibration.file import shipped_calibration
from undertow.planner.calibration.fit import fit, fit_constant, fit_rates, seconds_of
from undertow.planner.calibration.measured import Measurements, Row
from undertow.planner.calibration.text import calibration_text
from undertow.planner.geometry import build_geometry
from undertow.planner.memory.state import state_profile
from undertow.planner.timing.rates import Figure

SHIPPED = shipped_calibration()
MEASURED, RATES, ROWS = SHIPPED.measured, SHIPPED.rates, SHIPPED.rows
H200 = next(gpu for gpu in GPUS if gpu.name == "H200")


def with_rates(measured: Measurements, rates):
    return replace(SHIPPED, measured=measured, rates=rates)


def test_rates_do_not_depend_on_the_start():
    start = replace(RATES, matrix_tflops=Figure(500, "fitted", ""), head_tflops=Figure(500, "fitted", ""))
    fitted = fit_rates(MEASURED, start, ROWS, "again")
    assert round(fitted.matrix_tflops.value, 2) == RATES.matrix_tflops.value
    assert round(fitted.head_tflops.value, 2) == RATES.head_tflops.value
    assert fitted.matrix_tflops.source == "again"


def test_the_released_indexer_learning_fits_less_well():
    """The fit that was published with the costs took the operations of another indexer than the runs had."""
    other = replace(MEASURED, config=ModelConfig.from_preset("v4-flash"), frozen_indexer=False)
    fitted = fit_rates(other, RATES, ROWS, "released, learning")
    assert (round(fitted.matrix_tflops.value, 2), round(fitted.head_tflops.value, 2)) == (396.87, 1044.24)
    errors = [100 * (row.seconds / seconds_of(row, with_rates(other, fitted)) - 1) for row in ROWS]
    assert [round(error, 2) for error in errors] == [0.08, 0.05, -0.07, -0.06]


@pytest.mark.parametrize(
    ("used", "held_out", "errors"), [((2, 3), (0, 1), [0.11, 0.06]), ((0, 1), (2, 3), [-0.11, -0.06])]
)
def test_two_rows_foretell_the_other_two(used, held_out, errors):
    fitted = with_rates(MEASURED, fit_rates(MEASURED, RATES, [ROWS[n] for n in used], "two rows"))
    found = [100 * (ROWS[n].seconds / seconds_of(ROWS[n], fitted) - 1) for n in held_out]
    assert [round(error, 2) for error in found] == errors


@pytest.mark.parametrize("rows", [(1,), (1, 3)])
def test_rows_with_one_slowest_stage_hold_the_ratio(rows):
    with pytest.raises(ConfigError, match=f"^{len(rows)} rows do not determine two rates; give runs that differ in"):
        fit_rates(MEASURED, RATES, [ROWS[n] for n in rows], "too few")
    found = fit(replace(MEASURED, rows=tuple(ROWS[n] for n in rows)))
    rates = found.rates
    assert rates.head_tflops.value / rates.matrix_tflops.value == pytest.approx(1045.69 / 388.87, rel=1e-4)
    assert rates.matrix_tflops.value == pytest.approx(388.87, rel=2e-3)
    assert found.warnings[0].startswith(f"the rows with seconds ({len(rows)}) do not tell the rates of matrices and")
    assert "held at the shipped 2.69" in found.warnings[0]


def test_a_plan_takes_exactly_what_the_fit_says():
    for row in ROWS:
        plan = undertow.plan(
            "v4-flash", layout=row.layout, recompute=row.recompute,
            overrides=("model.indexer=own_rank", "indexer.frozen=true"),
        )  # fmt: skip
        assert float(plan.timeline.seconds) == seconds_of(row, SHIPPED) and plan.uncalibrated == ()


def other_runs(rate: float) -> Measurements:
    """Runs of a small model on other GPUs, whose seconds are made of given rates: the fit has to find them."""
    base = Measurements(
        name="mine", source="made up", date="2026-01-01", commit="abc", gpu=H200,
        config=ModelConfig.from_preset("v4-proxy"), preset="v4-proxy", frozen_indexer=False, sequence_length=2048,
        micro_batch=2, geometry=build_geometry(8, pipeline=2, expert=4), implementation="tight",
        profile=state_profile("published-bf16"), transfer_seconds=1e-3,
        rows=(
            Row("Ettt|ttmL", "none", "1f1b", 8), Row("Et|ttttmL", "0", "1f1b", 8),
            Row("Etttt|tmL", "none", "zb-h1", 4),
        ),
    )  # fmt: skip
    guess = SHIPPED.rates_of(H200)
    heads, core = Figure(2 * rate, "fitted", ""), guess.core
    truth = replace(guess, config=base.config, matrix_tflops=Figure(rate, "fitted", ""), head_tflops=heads, core=core)
    made = [replace(row, seconds=seconds_of(row, replace(SHIPPED, measured=base, rates=truth))) for row in base.rows]
    return replace(base, rows=tuple(made))


def test_another_model_gpu_shape_and_schedule():
    found = fit(other_runs(200.0))
    assert (found.rates.matrix_tflops.value, found.rates.head_tflops.value) == pytest.approx((200, 400), rel=1e-4)
    assert found.warnings == () and found.constant is None and found.memory is None
    assert all(abs(each.seconds or 0) < 1e-4 and each.peak_bytes is None for each in found.errors)
    assert found.rates.core["csa"].forward.mark == "scaled"
    plan = undertow.plan(
        "v4-proxy", "8xH200", layout="Ettt|ttmL", expert=4, global_batch=64, micro_batch=2, sequence_length=2048,
        implementation="tight", state="published-bf16", calibration=found,
    )  # fmt: skip
    assert float(plan.timeline.seconds) == pytest.approx(found.rows[0].seconds, rel=1e-4)
    assert plan.time.calibration == "mine"
    assert [note for note in plan.uncalibrated if note.startswith("time")] == []
    guessed = undertow.plan("v4-proxy", "8xMI355X", layout="Ettt|ttmL", expert=4, calibration=found)
    assert "time: rates of MI355X are guessed, 2.54 times H200 by the peak in BF16" in guessed.uncalibrated


def test_peaks_alone_leave_the_shipped_rates():
    found = fit(replace(MEASURED, rows=tuple(replace(row, seconds=None) for row in ROWS)))
    assert found.constant == SHIPPED.constant and found.rates.matrix_tflops.mark == "scaled"
    assert found.rates.matrix_tflops.value == RATES.matrix_tflops.value
    assert found.warnings == ("no row has seconds: rates are the shipped ones, in proportion to the peak in BF16",)


def test_the_constant_is_the_mean_over_the_rows():
    each = [fit_constant(replace(MEASURED, rows=(row,))) for row in ROWS]
    assert each == [12_772_000_000, 11_007_000_000, 9_786_000_000, 9_786_000_000]
    assert fit_constant(MEASURED) == pytest.approx(sum(each) / 4, abs=1e6)


def test_rows_that_no_run_can_have():
    below = replace(ROWS[0], peak_bytes=100 * 10**9)
    with pytest.raises(
        ConfigError, match=r"the peak of row 'Et.*first:3' is 100,000,000,000 bytes, below the state alone"
    ):
        fit(replace(MEASURED, rows=(below,)))
    fast = replace(ROWS[3], seconds=2.0, peak_bytes=None)
    with pytest.raises(
        ConfigError, match=r"row 'Et.*none' took 2 s, less than the 2\.\d+ s at the peak of MI355X; check"
    ):
        fit(replace(MEASURED, rows=(*ROWS[:3], fast)))


def test_a_misfit_is_a_warning():
    odd = (replace(ROWS[0], seconds=1.2 * ROWS[0].seconds), *ROWS[1:])
    found = fit(replace(MEASURED, rows=odd))
    told = "seconds of row 'Et*10|t*11|t*11|t*11mL, recompute first:3' come out -13.5% against what was measured"
    assert told in found.warnings and found.errors[0].seconds == pytest.approx(-0.135, abs=1e-3)


def test_a_constant_that_leaves_nothing_is_refused():
    rows = tuple(replace(row, peak_bytes=row.peak_bytes - 8 * 10**9) for row in ROWS if row.peak_bytes)
    with pytest.raises(ConfigError, match=r"memory constant is 2\.84 GB, but the symmetric heap alone is 3\.56 GB"):
        fit(replace(MEASURED, rows=rows))
    lean = replace(MEASURED, implementation="tight", rows=(replace(ROWS[0], peak_bytes=115 * 10**9),))
    with pytest.raises(ConfigError, match="but it cannot be negative; implementation tight"):
        fit(lean)


def test_as_many_rows_as_unknowns_are_told():
    two = calibration_text(fit(replace(MEASURED, rows=(ROWS[2], replace(ROWS[3], peak_bytes=None)))))
    assert "  seconds: 2 measured for 2 rates; their errors say nothing about the fit" in two.splitlines()
    assert "  GB: 1 peak measured for 1 constant; its error says nothing about the fit" in two.splitlines()
    one = calibration_text(fit(replace(MEASURED, rows=(ROWS[1],))))
    assert "  seconds: 1 measured for 1 rate, the ratio of logits to matrices being held; " in one
    assert "say nothing" not in calibration_text(SHIPPED)


def test_warnings_of_memory_and_time_are_told_apart():
    rows = [replace(ROWS[0], peak_bytes=250 * 10**9), *ROWS[1:]]
    found = fit(replace(MEASURED, rows=tuple(rows)))
    notes = undertow.plan("v4-flash", "32xMI355X", calibration=found).uncalibrated
    told = [note for note in notes if "come out" in note]
    assert told and all(note.startswith("memory: calibration mi355x-v4-flash: peak_bytes of row") for note in told)


def test_a_model_alone_is_planned_as_its_calibration_was_measured():
    mine = fit(replace(MEASURED, implementation="tight", profile=state_profile("adamw-bf16"), rows=(ROWS[2], ROWS[3])))
    task = undertow.plan("v4-flash", "32xMI355X", calibration=mine).task
    assert (task.microbatch.implementation, task.profile.name) == ("tight", "adamw-bf16")
    asked = undertow.plan("v4-flash", "32xMI355X", calibration=mine, implementation="primus", state="published-bf16")
    assert (asked.task.microbatch.implementation, asked.task.profile.name) == ("primus", "published-bf16")
    recipe = undertow.plan("pretrain/v4-flash-amd", "32xMI355X", calibration=mine).task
    assert recipe.microbatch.implementation == "reference"
