"""Modules that are computed again: bytes and seconds by hand from the table of saved tensors."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from undertow.config.layout import parse_layout
from undertow.config.model import ModelConfig
from undertow.model.activations import Objective, kept_terms, saved_terms
from undertow.model.modules import MODULES, WITHIN_MOE
from undertow.planner.geometry import Batch, Geometry, build_geometry
from undertow.planner.memory.activations import Microbatch, layer_saved
from undertow.planner.memory.modules import OPERATIONS_PER_BYTE, module_seconds, modules_of
from undertow.planner.memory.parameters import Stage
from undertow.planner.memory.recompute import Recompute
from undertow.planner.memory.saved import SavedTable
from undertow.planner.pipeline.timeline import StageTime
from undertow.planner.timing.costs import ModelTimes, stage_times

FLASH = ModelConfig.from_preset("v4-flash", indexer="own_rank")
UNIT = 4096 * 4096 * 2
SWA, CSA, HCA = 0, 2, 3


def table(implementation: str = "tight", **measured: int) -> SavedTable:
    geometry = build_geometry(32, pipeline=4, expert=8)
    return SavedTable(Microbatch(FLASH, geometry, Batch(256, 4096), implementation), measured)  # type: ignore[arg-type]


@pytest.mark.parametrize("layer", [SWA, CSA, HCA])
def test_bytes_that_modules_free(layer):
    lse = 64 * 4 / (4096 * 2)  # float32 of 64 heads
    # Queries before and after their norm; the output, de-rotated too; latent and output; fc1 is 6 and stays.
    tight = {"query": 16, "attention_core": 16 + lse, "output": 2 + 1, "expert_activation": 3, "shared_expert": 2.5}
    tight["moe"] = 0.375 + 6 + 6 + 3 + 1 + 2.5
    # Float32 streams of both mixers; a query is padded from 512 to 576; fc1 has 204,800 rows.
    primus = {"mixer_norm": 16, "query": 17, "attention_core": 16 + lse, "output": 3, "shared_expert": 2.5}
    primus["moe"] = 0.375 + 204_800 * 4096 * 2 / UNIT + 1 + 2.5
    for implementation, expected in {"tight": tight, "primus": primus}.items():
        saved = table(implementation)
        assert modules_of(implementation) == tuple(expected)
        assert {module: saved.freed(layer, module) / UNIT for module in expected} == expected


@pytest.mark.parametrize("implementation", ["tight", "primus"])
def test_modules_together_free_less_than_the_whole_layer(implementation):
    saved, modules = table(implementation), [m for m in modules_of(implementation) if "expert" not in m]
    for layer in (SWA, CSA, HCA):
        every = Recompute.of(**{module: (layer,) for module in modules})
        left, back = saved.left(layer, every)
        whole, whole_back = saved.left(layer, Recompute.of((layer,)))
        assert whole == 4 * UNIT < left and 0 < back < whole_back
        assert saved.full[layer] - left == sum(saved.freed(layer, module) for module in modules)
        for pair in combinations(modules, 2):  # each tensor is freed by one of them
            both = saved.left(layer, Recompute.of(**{module: (layer,) for module in pair}))[0]
            assert saved.full[layer] - both == sum(saved.freed(layer, module) for module in pair)


def test_what_modules_bring_back():
    saved, stage = table("primus"), Stage((2, 3))
    # The half with the experts is done with before the other begins; the mixers' norms are dealt out to both.
    one = saved.stage(stage, Recompute.of(moe=(3,), query=(3,), mixer_norm=(3,)))
    assert one.transient == saved.freed(3, "moe") + 8 * UNIT
    assert one.kept == (saved.full[2], saved.full[3] - sum(saved.freed(3, m) for m in ("moe", "query", "mixer_norm")))
    attention = saved.stage(stage, Recompute.of(attention_core=(3,), query=(3,)))
    assert attention.transient == saved.freed(3, "attention_core") + saved.freed(3, "query")
    # When the earlier layer comes, what the later one held has been freed.
    assert saved.stage(stage, Recompute.of(moe=(2,))).transient == 0


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("balance", [0, 2])
def test_the_reference_keeps_what_training_keeps(kernels, balance):
    """The planner's bytes of a stage are those of the model's closed form, by layer, for each module and several."""
    config = ModelConfig.from_preset("v4-debug")
    objective = Objective(balance_rows=balance)
    m = Microbatch(config, Geometry(), Batch(2, 64, 2), "reference", "bfloat16", objective, kernels)
    saved, layers = SavedTable(m), range(config.num_hidden_layers)
    assert modules_of("reference") == MODULES
    sets = [{module: layers for module in (each,)} for each in MODULES]
    sets += [{module: (1, 2) for module in MODULES if module not in WITHIN_MOE}, dict.fromkeys(MODULES[:-1], layers)]
    for named in (Recompute.of(**each) for each in sets):
        again = replace(objective, recompute=named.modules)
        told = [sum(term.bytes for term in kept_terms(m.pass_, layer, again)) for layer in layers]
        assert [saved.left(layer, named)[0] for layer in layers] == told
        whole = saved_terms(config, m.pass_.documents, "bfloat16", again, kernels=kernels)
        ends = sum(term.bytes for term in whole if not term.place.startswith(("layer", "mtp block")))
        stage = saved.stage(Stage((*layers, config.num_hidden_layers), embedding=True, head=True), named)
        assert (stage.ends, sum(stage.kept)) == (ends, sum(term.bytes for term in whole) - ends)


def test_measured_layers_keep_their_streams_at_least():
    saved = table("primus", csa=20 * UNIT)
    assert saved.left(CSA, Recompute.of(moe=(CSA,))) == (4 * UNIT, 16 * UNIT)
    assert saved.left(CSA, Recompute.of(output=(CSA,)))[0] == 17 * UNIT


def test_tensor_parallelism_divides_what_modules_free():
    m = Microbatch(FLASH, Geometry(tensor=4, expert=4), Batch(256, 4096), "tight")
    assert SavedTable(m).freed(CSA, "query") * 4 == table().freed(CSA, "query")
    names = [row.name for row in layer_saved(m, CSA)]
    assert len(names) == len(set(names))


def test_seconds_of_modules():
    rate, t = 400e12, 4096
    seconds = module_seconds(FLASH, CSA, 1, t, rate, 0.5e-3)
    assert seconds["query"] == 2 * t * 1024 * 64 * 512 / rate
    assert seconds["output"] == 2 * t * (64 * 512 * 1024 + 8 * 1024 * 4096) / rate
    assert seconds["shared_expert"] == 2 * t * 3 * 4096 * 2048 / rate
    assert seconds["moe"] == pytest.approx(2 * t * 3 * 4096 * 2048 * 7 / rate, rel=1e-12)  # a hash layer: no gate
    assert seconds["expert_activation"] == OPERATIONS_PER_BYTE * t * 6 * 2048 * 6 / rate
    assert seconds["mixer_norm"] == OPERATIONS_PER_BYTE * 2 * t * 4 * 4096 * 6 / rate
    # Turning the output back reads and writes 64 heads of 512 in bfloat16.
    assert seconds["attention_core"] == 0.5e-3 + OPERATIONS_PER_BYTE * t * 64 * 512 * 4 / rate
    twice = module_seconds(FLASH, CSA, 2, t, rate, 1e-3)
    assert all(twice[module] == pytest.approx(2 * seconds[module]) for module in seconds)


def test_stages_take_the_seconds_of_their_modules():
    blocks = (StageTime(1.0, 2.0, 1.0),) * 44
    times = ModelTimes(FLASH, blocks, blocks[0], modules=({"query": 0.25, "moe": 0.5},) * 43)
    layout = parse_layout("Et*10|t*12|t*12|t*9mL")
    plain, again = (stage_times(times, layout, r) for r in (Recompute(), Recompute.of((0,), query=(1, 12), moe=(1,))))
    assert [b.backward - a.backward for a, b in zip(plain, again, strict=True)] == [1.75, 0.25, 0, 0]
    assert [(b.forward, b.weight) for b in again] == [(a.forward, a.weight) for a in plain]
