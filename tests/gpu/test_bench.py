"""`undertow bench` on a GPU: kernels pass their check and are timed by graph, two settings of a step are measured."""

import json
import warnings

import pytest
import torch

from undertow.bench.timing import measure
from undertow.cli import main
from undertow.ops.registry import TRITON

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("op", ["swa", "hca", "csa", "pro-csa", "indexer", "distillation"])
def test_our_kernels_are_right_and_timed_by_graph(op, tmp_path):
    target = tmp_path / "result.json"
    words = ["--op", op, "--shape", "700+324", "--against", "none", "--json", str(target)]
    assert main(["bench", "kernels", *words]) == 0
    rows = [row for row in json.loads(target.read_text())["rows"] if row["way"] == "triton"]
    assert rows and {row["status"] for row in rows} == {"ok"}
    assert {row["ms"]["how"] for row in rows} == {"graph"}
    assert all(row["peak_bytes"] >= 0 and 0 < row["fraction_of_floor"] < 1.2 for row in rows)


@pytest.mark.parametrize(
    ("op", "hows"),
    [
        ("norm", {"graph"}),
        ("rotary", {"graph"}),
        pytest.param(
            "hyper", {"graph"}, marks=pytest.mark.skipif("hyper_in" not in TRITON, reason="not in the registry")
        ),
        ("pool", {"graph of 20 calls"}),
        ("swiglu", {"graph"}),
        ("router", {"graph of 20 calls"}),
        ("permute", {"graph", "graph of 20 calls"}),
        ("experts", {"graph"}),
        ("loss", {"graph"}),
        ("optimizer", {"events"}),
    ],
)
def test_small_operators_are_right_and_timed(op, hows, tmp_path):
    target = tmp_path / "result.json"
    words = ["--op", op, "--shape", "700+324", "--against", "torch", "--json", str(target)]
    assert main(["bench", "kernels", *words]) == 0
    rows = json.loads(target.read_text())["rows"]
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["ms"]["how"] for row in rows if row["way"] == "triton"} == hows


def test_a_graph_holds_as_many_calls_as_are_wanted():
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.zeros((), device="cuda")
        found = measure(lambda: x.add_(1.0), torch.device("cuda"), seconds=0.01, calls=20)
        torch.cuda.synchronize()
    # Two calls by themselves, and two replays more than are counted.
    assert found.how == "graph of 20 calls" and float(x) == 2 + 20 * (found.repeats + 2)


def test_what_waits_for_the_gpu_is_timed_by_events():
    x = torch.ones(1000, device="cuda")
    assert measure(lambda: x.nonzero(), torch.device("cuda"), seconds=0.01).how == "events"
    assert torch.cuda.get_sync_debug_mode() == 0
    with torch.cuda.stream(torch.cuda.Stream()):
        y = torch.ones(1000, device="cuda", requires_grad=True)
        z = (y * 2).sum()
        found = measure(lambda: torch.autograd.grad(z, y, retain_graph=True), torch.device("cuda"), seconds=0.01)
        assert found.how == "graph"


def test_a_copy_is_timed_by_call_and_without_a_warning():
    x, y = torch.ones(2, 1 << 20, device="cuda")
    with warnings.catch_warnings(), torch.cuda.stream(torch.cuda.Stream()):
        warnings.simplefilter("error")
        assert measure(lambda: y.copy_(x), torch.device("cuda"), seconds=0.01).how == "graph"
        assert measure(lambda: y.copy_(x), torch.device("cuda"), seconds=0.01, captured=False).how == "events"


def test_reference_against_kernels_in_a_step(tmp_path):
    target = tmp_path / "result.json"
    against = ["--against", "attention.backend=reference", "--against", "attention.csa_backend=reference"]
    words = ["v4-small", "train.batch_size=1", "--steps", "2", "--json", str(target)]
    assert main(["bench", "step", *words, *against]) == 0
    result = json.loads(target.read_text())
    first, second = result["settings"]
    assert result["order"] == "in turns"
    assert first["losses"][0] == pytest.approx(second["losses"][0], rel=2e-2)
    assert min(first["peak_memory"]["bytes"], second["peak_memory"]["bytes"]) > 2 * 10**8
    assert list(first["calls"]["csa_attention"]) == ["triton"] and first["passed_on"] == []
    assert "csa_attention" not in second["calls"]
