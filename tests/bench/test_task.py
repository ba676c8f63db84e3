"""What a way may turn out to do: right and timed, wrong and not timed, absent, failed."""

import math

import pytest
import torch

from undertow.bench import task as task_module
from undertow.bench.ceilings import Ceilings
from undertow.bench.task import Absent, Task, Way, relative, run_task
from undertow.bench.timing import measure
from undertow.bench.work import Work
from undertow.config.errors import InputError

REACHED = Ceilings(copy=1e9, matmul=1e9, copied=0, side=0)
EXPECTED = torch.ones(4)


def raising(error):
    def build():
        raise error

    return build


def rows(cpu, **ways):
    task = Task("op", "4", Work(1000, 2e6, 3e6), lambda found: relative(found, EXPECTED), ways)
    return {row["way"]: row for row in run_task(task, REACHED, cpu)}


def test_a_right_way_is_timed(cpu):
    row = rows(cpu, right=Way(lambda: lambda: EXPECTED + 1e-3, 3e-3))["right"]
    assert row["status"] == "ok" and row["error"] == pytest.approx(1e-3, rel=1e-3)
    assert row["floor_ms"] == 2.0 and row["bound"] == "math"
    median = row["ms"]["median"]
    assert row["ms"]["lowest"] <= median <= row["ms"]["highest"] and row["ms"]["how"] == "clock"
    assert row["fraction_of_floor"] == pytest.approx(2.0 / median)
    assert row["tflops_exact"] * 1.5 == pytest.approx(row["tflops_nominal"])
    assert row["gigabytes_per_second"] == pytest.approx(1e-3 / median)


@pytest.mark.parametrize(
    ("found", "error"), [(EXPECTED + 4e-3, 4e-3), (EXPECTED * math.nan, "nan"), (torch.ones(5), "inf")]
)
def test_a_wrong_way_has_its_error_and_no_time(cpu, found, error):
    calls = []
    row = rows(cpu, wrong=Way(lambda: lambda: calls.append(1) or found, 3e-3))["wrong"]
    assert row["status"] == "wrong" and "ms" not in row and len(calls) == 1
    assert row["error"] == error if isinstance(error, str) else row["error"] == pytest.approx(error, rel=1e-3)


def test_absent_and_failing_ways_leave_the_others(cpu):
    def fails():
        raise RuntimeError("out of\n registers")

    found = rows(
        cpu,
        peer=Way(raising(Absent("is not installed"))),
        ours=Way(raising(InputError("ops.op: backend 'triton' cannot serve"))),
        broken=Way(lambda: fails),
        right=Way(lambda: lambda: EXPECTED),
    )
    assert (found["peer"]["status"], found["peer"]["reason"]) == ("absent", "is not installed")
    assert found["ours"]["reason"] == "ops.op: backend 'triton' cannot serve"
    assert (found["broken"]["status"], found["broken"]["reason"]) == ("failed", "RuntimeError: out of registers")
    assert found["right"]["status"] == "ok"


def test_how_a_task_is_measured_is_its_own(cpu, monkeypatch):
    asked = []
    monkeypatch.setattr(task_module, "measure", lambda run, device, **how: asked.append(how) or measure(run, device))
    ways = {"right": Way(lambda: lambda: EXPECTED)}
    for how in ({}, {"calls": 20}, {"captured": False}):
        run_task(Task("op", "4", Work(1), lambda found: 0.0, ways, **how), REACHED, cpu)
    assert asked == [{"calls": 1, "captured": True}, {"calls": 20, "captured": True}, {"calls": 1, "captured": False}]


def test_relative_error_is_of_norms_with_a_least_one():
    assert relative(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert relative(torch.tensor([0.5]), torch.zeros(1), least=2.0) == pytest.approx(0.25)
    assert relative(torch.zeros(0), torch.zeros(0)) == 0.0


def test_measuring_calls_once_before_it_counts(cpu):
    calls = []
    times = measure(lambda: calls.append(1), cpu, seconds=0.0)
    assert times.repeats == 5 and len(calls) == 6
