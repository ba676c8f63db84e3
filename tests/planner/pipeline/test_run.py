"""The published rows, layer and stage times, and the predictions that rest on the same two fitted rates."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from undertow.config.errors import ConfigError
from undertow.config.layout import Layout, parse_layout
from undertow.config.model import ModelConfig
from undertow.planner.calibration.file import shipped_calibration
from undertow.planner.memory.recompute import Recompute
from undertow.planner.pipeline.run import approximate_seconds, pipeline_timeline
from undertow.planner.pipeline.schedules import build_schedule
from undertow.planner.pipeline.timeline import Timeline, simulate
from undertow.planner.timing.costs import MicrobatchShape, add, first_layers, model_times, stage_times, tflops_per_gpu
from undertow.planner.timing.rates import Figure

FLASH = ModelConfig.from_preset("v4-flash")
PUBLISHED = ModelConfig.from_preset("v4-flash", indexer="own_rank")
BATCH = MicrobatchShape(PUBLISHED, 4096, frozen_indexer=True)
SHIPPED = shipped_calibration()
RATES = SHIPPED.rates
TIMES = model_times(BATCH, RATES)
EVEN, TUNED = parse_layout("Et*10|t*11|t*11|t*11mL"), parse_layout("Et*10|t*12|t*12|t*9mL")
SPREAD = parse_layout("Et*6|t*5|t*6|t*6|t*6|t*6|t*5|t*3mL")
ROWS = [(EVEN, 3, 1167.2, 1167.8), (TUNED, 3, 1273.4, 1273.8), (EVEN, 0, 1255.7, 1255.1), (TUNED, 0, 1378.8, 1378.3)]


def run(layout: Layout, recomputed: int = 0, times=TIMES, **options) -> Timeline:
    recompute = Recompute(first_layers(layout, recomputed))
    return pipeline_timeline(layout, times, ranks=4, microbatches=32, recompute=recompute, **options)


def reported(timeline: Timeline) -> float:
    return tflops_per_gpu(PUBLISHED, 4096, 256 * 4096, float(timeline.seconds), 32)[1]


def milliseconds(seconds) -> float:
    return 1e3 * float(seconds)


@pytest.mark.parametrize(("layout", "recomputed", "measured", "printed"), ROWS)
def test_published_rows(layout, recomputed, measured, printed):
    rate = reported(run(layout, recomputed))
    assert rate == pytest.approx(measured, rel=6e-4)
    assert round(rate, 1) == printed
    # Published before, of the released indexer, learning: the rates absorb the difference to what was measured.
    rounded = replace(RATES, matrix_tflops=Figure(397, "fitted", ""), head_tflops=Figure(1044, "fitted", ""))
    times = model_times(MicrobatchShape(FLASH, 4096), rounded)
    assert reported(run(layout, recomputed, times)) == pytest.approx(measured, rel=1.1e-3)


def test_shipped_rows_are_the_published_ones():
    total = 377.103e15  # reported operations of an iteration
    found = [(row.layout, row.recompute, round(total / row.seconds / 32e12, 1)) for row in SHIPPED.rows]
    words = {0: "none", 3: "first:3"}
    assert found == [(str(layout), words[recomputed], measured) for layout, recomputed, measured, _ in ROWS]


@pytest.mark.parametrize(("layer", "forward", "backward"), [(43, 6.2, 12.7), (4, 6.9, 14.9), (3, 6.3, 13.0)])
def test_layer_times(layer, forward, backward):
    projection = 4 * 4096 * 4096**2 / 388.87e12
    time = TIMES.blocks[layer]
    if layer == 43:  # the layer within the MTP block
        head = TIMES.head
        time = time._replace(
            forward=time.forward - head.forward - projection, backward=time.backward - head.backward - 2 * projection
        )
    assert (round(milliseconds(time.forward), 1), round(milliseconds(time.backward), 1)) == (forward, backward)


def test_tail_weighs_as_much_as_two_layers_and_a_third():
    tail = add(TIMES.blocks[43], TIMES.head)
    assert (round(milliseconds(tail.forward), 1), round(milliseconds(tail.backward), 1)) == (15.2, 30.7)
    layers = [block.forward + block.backward for block in TIMES.blocks[:43]]
    assert (tail.forward + tail.backward) / (sum(layers) / 43) == pytest.approx(2.3, abs=0.1)


def test_stage_times_and_bubbles():
    for layout, recomputed, printed, waits in (
        (TUNED, 0, [202, 246, 246, 232], [24, 8, 8, 13]),
        (EVEN, 3, [221, 247, 244, 293], [30, 22, 23, 7]),
    ):
        stages = stage_times(TIMES, layout, Recompute(first_layers(layout, recomputed)))
        assert [round(milliseconds(stage.forward + stage.backward)) for stage in stages] == printed
        timeline = run(layout, recomputed)
        assert [round(100 * timeline.bubble_fraction(rank)) for rank in range(4)] == waits


def test_approximation_of_the_rows():
    for layout, recomputed, _, _ in ROWS:
        seconds = float(run(layout, recomputed).seconds)
        stages = stage_times(TIMES, layout, Recompute(first_layers(layout, recomputed)))
        assert float(approximate_seconds(stages, 32)) == pytest.approx(seconds, rel=3e-3)


def test_one_rate_for_everything_misses_the_rows():
    """Layers at the rate that fits the reference row, heads too: the gains come out wrong, so there are two rates."""
    one = replace(RATES, head_tflops=RATES.matrix_tflops)
    times = model_times(BATCH, one)
    base = reported(run(EVEN, 3, times))
    gains = [100 * (reported(run(layout, n, times)) / base - 1) for layout, n, _, _ in ROWS[1:]]
    assert gains == pytest.approx([12.4, 6.8, 21.1], abs=0.3)


def test_predictions():
    spread = run(SPREAD, schedule="interleaved")
    assert spread.seconds == pytest.approx(7.90, rel=5e-3)
    assert reported(spread) == pytest.approx(1492, rel=5e-3)
    assert spread.ranks[0].in_flight == Fraction(11, 2)
    split = run(TUNED, schedule="zb-h1")
    assert split.seconds == pytest.approx(8.11, rel=5e-3)
    assert reported(split) == pytest.approx(1453, rel=5e-3)
    # 8.11 is both halves of a backward pass as long: the core has no weight gradient, so less is left to fill waits.
    halves = [stage._replace(weight=stage.backward / 2) for stage in stage_times(TIMES, TUNED)]
    assert round(simulate(build_schedule("zb-h1", 4, 32), halves).seconds, 2) == 8.11
    assert round(split.seconds, 3) == 8.131
    balanced = 32 * sum(t.forward + t.backward for t in stage_times(TIMES, TUNED)) / 4
    assert balanced == pytest.approx(7.41, rel=5e-3)


def test_transfer_is_felt_most_between_balanced_neighbours():
    hidden, felt = (float(run(layout, transfer=2.7e-3).seconds / run(layout).seconds) - 1 for layout in (EVEN, TUNED))
    assert (hidden, felt) == pytest.approx((0.0017, 0.0120), abs=1e-4)


def test_a_standalone_mtp_block_has_its_own_head():
    both = stage_times(TIMES, parse_layout("Et*11|t*11|t*11|t*10mL"))[3]
    apart = stage_times(TIMES, parse_layout("Et*11|t*11|t*11|t*10|m|L"))
    assert add(*apart[3:]) == pytest.approx(both)
    assert apart[5] == TIMES.head


def test_a_frozen_indexer_has_no_backward():
    frozen = model_times(replace(BATCH, frozen_indexer=True), RATES)
    learning = model_times(replace(BATCH, frozen_indexer=False), RATES)
    less = [milliseconds(a.backward - b.backward) for a, b in zip(learning.blocks, frozen.blocks, strict=True)]
    operations = 2 * 4096 * (4096 * 128 + 128 * 8192 + 4096 * 64 + 4 * 4096 * 128) + 2 * 64 * 128 * 2_096_128
    each = round(2 * operations / 388.87e9, 2)
    assert [round(value, 2) for value in less[:6]] == [0, 0, each, 0, each, 0] and each == 0.34
    assert [block.forward for block in frozen.blocks] == [block.forward for block in learning.blocks]


def test_only_products_with_weights_have_a_weight_gradient():
    """Neither the attention core nor the indexer's scores: the rest of the backward pass is the longer half."""
    csa = model_times(replace(BATCH, frozen_indexer=False), RATES).blocks[4]
    products = csa.forward - 0.53e-3
    scores = 2 * 64 * 128 * 2_096_128 / 388.87e12
    assert csa.weight == pytest.approx(products - scores)
    assert csa.backward - csa.weight == pytest.approx(products + scores + 2.55e-3)


def test_time_is_in_proportion_to_rows():
    double = model_times(replace(BATCH, rows=2), RATES)
    assert double.blocks[4] == pytest.approx(add(TIMES.blocks[4], TIMES.blocks[4]))
    assert double.head == pytest.approx(add(TIMES.head, TIMES.head))


def test_what_the_rates_cover():
    assert RATES.covers(FLASH, 4096) and RATES.covers(PUBLISHED, 4096)
    assert RATES.covers(ModelConfig.from_preset("v4-flash", initializer_range=0.008), 4096)
    assert not RATES.covers(FLASH, 8192)
    assert not RATES.covers(ModelConfig.from_preset("v4-pro"), 4096)
    half = RATES.scaled("other", 0.5)
    assert not half.covers(FLASH, 4096)
    assert (half.matrix_tflops.value, half.matrix_tflops.mark) == (194.435, "scaled")
    assert model_times(BATCH, half).blocks[4] == pytest.approx(add(TIMES.blocks[4], TIMES.blocks[4]))


def test_refusals():
    with pytest.raises(
        ConfigError, match="zb-h1 splits the backward pass, so layers 0, 10, 22, 34 cannot be recomputed"
    ):
        run(TUNED, 1, schedule="zb-h1")
    with pytest.raises(ConfigError, match=r"recomputed layers \[43\]: only decoder layers are recomputed, 0 to 42"):
        stage_times(TIMES, TUNED, Recompute.of((43,)))
    with pytest.raises(ConfigError, match="schedule 1f1b: 2 stages on each rank; it takes 1"):
        run(SPREAD)


def test_a_timeline_is_quick_and_needs_no_torch():
    began = time.perf_counter()
    for _ in range(20):
        run(TUNED, 3)
    assert (time.perf_counter() - began) / 20 < 0.05
    probe = "import sys, undertow.planner.pipeline.run; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    root = Path(__file__).parents[3]
    found = subprocess.run([sys.executable, "-c", probe], cwd=root, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
