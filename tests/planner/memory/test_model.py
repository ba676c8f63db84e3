"""Memory of ranks against the published projection and the four measured peaks, and what each term does."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

import undertow
from undertow.config.errors import ConfigError
from undertow.config.layout import parse_layout
from undertow.config.model import ModelConfig
from undertow.config.schema import RunConfig
from undertow.model.activations import Objective, even_documents
from undertow.model.parameters import Parameters
from undertow.model.peak import peak_bytes
from undertow.planner.calibration.file import shipped_calibration
from undertow.planner.calibration.measured import MemoryCalibration
from undertow.planner.geometry import Batch, Geometry, build_geometry
from undertow.planner.memory.activations import Microbatch, implementation_of, pool_rows
from undertow.planner.memory.model import Held, MemoryModel, Term
from undertow.planner.memory.parameters import Stage
from undertow.planner.memory.recompute import Recompute, read_recompute
from undertow.planner.memory.state import profile_of_run, state_profile

OWN_RANK = ModelConfig.from_preset("v4-flash", indexer="own_rank")
RUN = build_geometry(32, pipeline=4, expert=8)
GIB = 2**30
SHIPPED = shipped_calibration()
FITTED = SHIPPED.memory
assert FITTED
PEAKS = {str(row): row.peak_bytes for row in SHIPPED.rows}
STATE = ("weights", "gradient buffers", "optimizer state")


def model(implementation="tight", profile="published-fp32", geometry=RUN, **changes) -> MemoryModel:
    m = Microbatch(OWN_RANK, geometry, Batch(256, 4096), implementation)
    return MemoryModel(m, state_profile(profile), **changes)


def pipeline(layout: str) -> list[list[Held]]:
    parsed = parse_layout(layout)
    return [[Held(Stage.of(parsed, stage), 4 - stage)] for stage in range(4)]


def first(layout: str, recomputed: int) -> Recompute:
    parsed = parse_layout(layout)
    return Recompute.of(layer for stage in range(4) for layer in parsed.layers(stage)[:recomputed])


def test_published_projection():
    rank = model().rank(0, [Held(Stage(tuple(range(11)), True), 4)])
    weights, gradients, optimizer = (rank.bytes_of(name) / GIB for name in STATE)
    activations = rank.total_bytes / GIB - weights - gradients - optimizer
    assert weights == pytest.approx(20.38, rel=2e-4)
    assert gradients + optimizer == pytest.approx(142.67, rel=2e-4)
    assert activations == pytest.approx(94.56, rel=0.02) and activations == pytest.approx(93.08, abs=0.01)
    assert rank.total_bytes / GIB == pytest.approx(257.62, rel=0.01)


@pytest.mark.parametrize(
    ("row", "state", "stage"),
    [
        ("Et*10|t*11|t*11|t*11mL, recompute first:3", (89.7, 96.0, 96.0, 109.9), 0),
        ("Et*10|t*12|t*12|t*9mL, recompute first:3", (89.7, 104.7, 104.7, 92.5), 1),
        ("Et*10|t*11|t*11|t*11mL, recompute none", (89.7, 96.0, 96.0, 109.9), 0),
        ("Et*10|t*12|t*12|t*9mL, recompute none", (89.7, 104.7, 104.7, 92.5), 0),
    ],
)
def test_measured_peaks(row, state, stage):
    layout, recomputed = row.split(", recompute ")
    projection = model("primus", "published-bf16", calibration=FITTED)
    memory = projection.plan(pipeline(layout), 288 * 10**9, recompute=read_recompute(recomputed, parse_layout(layout)))
    assert memory.peak.total_bytes == pytest.approx(PEAKS[row], rel=0.01)
    assert memory.peak.stage == stage and memory.fits and memory.uncalibrated == ()
    assert tuple(round(sum(rank.bytes_of(name) for name in STATE) / 1e9, 1) for rank in memory.stages) == state


def test_fitted_constant_and_its_heap():
    rank = model("primus", "published-bf16", calibration=FITTED).rank(0, [Held(Stage((0,), True), 1)])
    rest = rank.bytes_of("fitted constant of mi355x-v4-flash, less its heap")
    assert rank.bytes_of("symmetric heap") + rest == FITTED.constant == 10_838_000_000
    assert rank.bytes_of("symmetric heap") == 2 * 204_800 * 4096 * 2 + 4096 * 6 * 4096 * 2
    assert SHIPPED.memory_of("primus") is FITTED and SHIPPED.memory_of("tight") is None


@pytest.mark.parametrize(
    ("profile", "total"),
    [
        ("published-fp32", 163.041),
        ("published-bf16", 91.710),
        ("published-bf16-main", 108.694),
        ("published-muon", 14 * 10_940_194_706 / GIB),
    ],
)
def test_state_profiles(profile, total):
    rank = model(profile=profile).rank(0, [Held(Stage(tuple(range(11)), True), 0)])
    found = sum(rank.bytes_of(name) for name in STATE) / GIB
    assert found == pytest.approx(total, abs=1e-3)


def test_experts_and_dense_weights_have_their_own_widths():
    wide = build_geometry(64, pipeline=4, expert=8)
    held = [Held(Stage(tuple(range(11)), True), 0)]
    narrow, twice = (model(geometry=each).rank(0, held).bytes_of("optimizer state") for each in (RUN, wide))
    assert narrow == 12 * 8_858_370_048 + -(-12 * 2_081_824_658 // 8)
    assert twice == 12 * 8_858_370_048 // 2 + -(-12 * 2_081_824_658 // 16)


@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_deferred_synchronisation_costs_the_same_on_any_number_of_nodes(ranks):
    geometry = Geometry(expert=8, data=ranks)
    held = [Held(Stage(tuple(range(8)), True), 1)]
    prompt, late = (
        model(profile="adamw-bf16", geometry=geometry, deferred=deferred).rank(0, held) for deferred in (False, True)
    )
    whole = model(profile="adamw-bf16", geometry=geometry, sharing="none").rank(0, held)
    names = ("unsharded weights", "unsharded gradients")
    assert all(late.bytes_of(name) > 3 * prompt.bytes_of(name) > 0 for name in names)
    for name, shared in zip(names, STATE[:2], strict=True):
        assert late.bytes_of(name) + late.bytes_of(shared) == whole.bytes_of(shared)
    assert all(whole.bytes_of(name) == 0 for name in names)


def test_recomputed_layer_keeps_all_streams():
    saved = model("primus").saved
    four = 4 * 4096 * 4096 * 2
    some = saved.stage(Stage(tuple(range(10)), True), Recompute.of((0, 1, 2)))
    assert some.kept[:3] == (four,) * 3 and some.kept[3] > 100 * four / 4 and some.transient == 0
    every = saved.stage(Stage((2, 3)), Recompute.of((2, 3)))
    # The last layer is computed again while nothing of this microbatch has been freed yet.
    assert every.kept == (four, four) and every.transient == saved.full[3] - four
    late = saved.stage(Stage((2, 3)), Recompute.of((3,)))
    assert late.transient == saved.full[3] - four


def test_pool_holds_the_worst_case():
    assert pool_rows(OWN_RANK, RUN, 4096) == 204_800
    few = ModelConfig.from_preset("v4-flash", n_routed_experts=8)
    assert pool_rows(few, RUN, 4096) == 8 * 4096 + 256  # one expert a rank: a token comes once


def test_tables_of_saved_tensors():
    unit = 4096 * 4096 * 2
    for implementation, sums in {"tight": (66.9, 68.2, 67.2), "primus": (119.6, 120.9, 119.9)}.items():
        full = model(implementation).saved.full
        assert [full[layer] / unit for layer in (0, 2, 3)] == pytest.approx(sums, abs=0.15)
        assert full[43] == full[0]


def test_measured_bytes_of_a_layer_replace_the_table():
    fields = {**vars(FITTED), "saved": {"csa": 3_000_000_000}}
    projection = model("primus", calibration=MemoryCalibration(**fields))
    assert projection.saved.full[2] == 3_000_000_000
    assert projection.saved.full[3] == model("primus").saved.full[3]
    rank = projection.rank(1, [Held(Stage((2, 4)), 2)])
    assert Term("saved activations of layers", 12_000_000_000, "measured") in rank.terms


def test_tensor_and_context_divide_activations():
    plain = model().saved.full[2]
    for geometry in (Geometry(tensor=4, expert=4), Geometry(context=4, expert=4)):
        part = model(geometry=geometry).saved.full[2]
        assert plain / 4 <= part < plain / 3.5


def test_one_gpu_equals_the_peak_of_the_model():
    config = ModelConfig.from_preset("v4-small")
    m = Microbatch(config, Geometry(), Batch(16, 512, 8), "reference", "bfloat16", Objective(balance_rows=8))
    profile = state_profile("muon-fp32")
    layout = parse_layout("Et*9mL")
    memory = MemoryModel(m, profile).plan([[Held(Stage.of(layout, 0), 1)]], 141 * 10**9)
    expected = peak_bytes(config, even_documents(4096, 512), profile.profile, Objective(balance_rows=8))
    assert memory.peak.total_bytes == expected.total and memory.uncalibrated == ()
    again = MemoryModel(m, profile).plan(
        [[Held(Stage.of(layout, 0), 1)]], 141 * 10**9, recompute=Recompute.of(range(9))
    )
    assert again.peak.total_bytes < memory.peak.total_bytes
    kernels = MemoryModel(replace(m, kernels=True), profile).plan([[Held(Stage.of(layout, 0), 1)]], 141 * 10**9)
    of_kernels = peak_bytes(config, even_documents(4096, 512), profile.profile, Objective(balance_rows=8), kernels=True)
    assert kernels.peak.total_bytes == of_kernels.total < memory.peak.total_bytes


def test_reference_on_several_gpus():
    config = ModelConfig.from_preset("v4-small")
    layout = parse_layout("Et*4|t*5mL")
    held = [[Held(Stage.of(layout, stage), 2 - stage)] for stage in range(2)]
    m = Microbatch(config, Geometry(pipeline=2), Batch(4, 512), "reference", "bfloat16", Objective(balance_rows=1))
    table = MemoryModel(m, state_profile("adamw-fp32")).saved
    whole = MemoryModel(m, state_profile("adamw-fp32")).saved.stage(Stage.of(parse_layout("Et*9mL"), 0)).total
    parts = [table.stage(each[0].stage).total for each in held]
    assert whole < sum(parts) < 1.001 * whole  # rotary tables lie on both
    memory = MemoryModel(m, state_profile("adamw-fp32")).plan(held, 10**12)
    assert len(memory.ranks) == 2 and "no peak was measured for implementation reference" in memory.uncalibrated[0]


def test_limit_and_units():
    projection = model("primus", "published-bf16", calibration=FITTED)
    memory = projection.plan(pipeline("Et*10|t*12|t*12|t*9mL"), 288 * 10**9)
    assert memory.limit_bytes == 288 * 10**9 and len(memory.ranks) == 32
    assert [memory.ranks[i].stage for i in (0, 7, 8, 31)] == [0, 0, 1, 3]
    tight = model("primus").plan(pipeline("Et*10|t*12|t*12|t*9mL"), 288 * 10**9, margin=0.05)
    assert tight.limit_bytes == 273_600_000_000 and not tight.fits
    term = Term("x", 3 * GIB, "measured")
    assert (term.gib, term.gb) == (3.0, 3.221225472)


def test_what_no_row_covers():
    other = MemoryModel(
        Microbatch(OWN_RANK, build_geometry(16, pipeline=4, expert=4), Batch(256, 8192), "primus"),
        state_profile("published-fp32"),
        FITTED,
    ).plan([[Held(Stage((0,)), 1)]], 10**12)
    assert [note.split(", ")[0] for note in other.uncalibrated] == [
        "memory: profile is published-fp32",
        "memory: expert is 4",
        "memory: tokens is 8192",
    ]


@pytest.mark.parametrize(
    ("implementation", "geometry", "message"),
    [
        ("primus", Geometry(tensor=2, expert=2), "implementation primus: its expert kernel needs tensor 1, given 2"),
        ("primus", Geometry(expert=16, data=16), "implementation primus: its expert kernel needs expert 2 to 8"),
        ("reference", Geometry(tensor=2), "implementation reference has no tensor parallelism, tensor is 2"),
    ],
)
def test_what_cannot_run(implementation, geometry, message):
    with pytest.raises(ConfigError) as caught:
        model(implementation, geometry=geometry).rank(0, [Held(Stage((0,)), 1)])
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("train", "dtype", "bytes_each"),
    [
        ({"optimizer": "adamw"}, "bfloat16", (2, 4, 12)),
        ({"optimizer": "adamw", "state_profile": "bf16"}, "bfloat16", (2, 2, 6)),
        ({"optimizer": "muon"}, "bfloat16", (2, 4, 8)),
        ({"optimizer": "muon"}, "float32", (4, 4, 4)),
    ],
)
def test_profile_of_a_run(train, dtype, bytes_each):
    run = RunConfig.model_validate(
        {"model": OWN_RANK, "train": {**train, "micro_batch_size": 1}, "numerics": {"dtype": dtype}}
    )
    found = profile_of_run(run)
    matrices = Parameters(1000, 0, 1000, 0, 1000)
    assert found.sharing == "full" and found.name == f"{run.train.optimizer}-{run.train.state_profile}"
    kept = found.profile
    sizes = kept.weights(matrices), kept.gradients(matrices), kept.optimizer_state(matrices)
    assert sizes == tuple(1000 * each for each in bytes_each)


def test_unknown_names():
    with pytest.raises(ConfigError, match="unknown state profile 'adamw-fp8'; did you mean 'adamw-fp32'"):
        state_profile("adamw-fp8")
    with pytest.raises(ConfigError, match="unknown implementation 'primos'; did you mean 'primus'"):
        implementation_of("primos")


def test_import_loads_neither_torch_nor_numpy():
    modules = "memory, undertow.planner.serving.room, undertow.planner.serving.decode, undertow.config.clusters"
    probe = f"import sys, undertow.planner.{modules}; assert not {{'torch', 'numpy'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("widths", [{"pipeline": 4}, {"pipeline": 8, "tensor": 4}, {"pipeline": 1, "expert": 32}])
@pytest.mark.parametrize("state", ["published-bf16", "adamw-fp32", "published-muon"])
def test_no_fullest_rank_has_less_than_an_equal_share_of_the_state(widths, state):
    given = {"implementation": "tight", "tensor": 1, "expert": 4, "state": state, **widths}
    plan = undertow.plan("v4-flash", "32xMI355X", **given)
    least, names = plan.task.memory_model.least_state_bytes, ("weights", "gradient buffers", "optimizer state")
    shares = [sum(map(rank.bytes_of, names)) for rank in plan.memory.stages]
    assert 0.97 * sum(shares) / len(shares) <= least <= max(shares)


def test_what_is_advised_where_state_is_the_most():
    optimizer = undertow.plan("v4-flash", "8xH200").refusal
    assert optimizer and optimizer.endswith("or a leaner state, or keep it on the host with --offload-optimizer")
    saved = undertow.plan("v4-flash", "32xMI355X", pipeline=4, tensor=1, sequence_length=131_072).refusal
    assert saved and saved.endswith("or a leaner state")
