"""What a rank computes again against all sets, on random small ranks; the bound where sets are too many."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from random import Random

import pytest

from undertow.config.model import ModelConfig
from undertow.planner.geometry import Batch, build_geometry
from undertow.planner.memory.activations import Microbatch
from undertow.planner.memory.model import Held, MemoryModel
from undertow.planner.memory.modules import modules_of
from undertow.planner.memory.recompute import MODULES, Recompute
from undertow.planner.memory.state import state_profile
from undertow.planner.options import Kind, LayerOptions, Option, undominated
from undertow.planner.pipeline.timeline import StageTime
from undertow.planner.timing.costs import ModelTimes
from undertow.planner.tuner.case import Case, Span
from undertow.planner.tuner.knapsack import Knapsacks
from undertow.planner.tuner.levels import fill


def small_case(seed: int, layers: int, granularity: str, implementation="tight", **options) -> Case:
    """A small model on 2 ranks, random seconds of layers and modules."""
    random = Random(seed)
    ratios = [random.choice((0, 4, 128)) for _ in range(layers)]
    config = ModelConfig.from_preset(
        "v4-small", num_hidden_layers=layers, compress_ratios=[*ratios, 0], num_hash_layers=0
    )
    times = [StageTime(f, 2 * f, f) for f in (random.choice((0.8, 1.0, 1.3)) for _ in range(layers + 2))]
    modules = [{m: random.uniform(0.02, 0.5) * times[n].forward for m in MODULES} for n in range(layers)]
    geometry = build_geometry(4, pipeline=2, expert=2)
    memory = MemoryModel(Microbatch(config, geometry, Batch(16, 512), implementation), state_profile("published-bf16"))
    costs = ModelTimes(config, tuple(times[:-1]), times[-1], modules=tuple(modules))
    return Case(costs, memory, 8, (10**15,) * 2, granularity=granularity, **options)  # type: ignore[arg-type]


def every_set(case: Case, layers: range) -> Iterator[Recompute]:
    """All ways to compute layers again, by sets of their modules and whole."""
    names = modules_of(case.memory.m.implementation) if case.granularity == "module" else ()
    ways: list[frozenset | None] = [None]
    for bits in product((False, True), repeat=len(names)):
        chosen = frozenset(name for name, bit in zip(names, bits, strict=True) if bit)
        if "moe" not in chosen or not chosen & {"expert_activation", "shared_expert"}:
            ways.append(chosen)
    for each in product(ways, repeat=len(layers)):
        whole = frozenset(layer for layer, way in zip(layers, each, strict=True) if way is None)
        named = ((layer, m) for layer, way in zip(layers, each, strict=True) for m in way or ())
        yield Recompute(whole, frozenset(named))


@pytest.mark.parametrize(
    ("granularity", "implementation", "count"),
    [("layer", "tight", 6), ("module", "tight", 1), ("module", "primus", 1), ("module", "tight", 2)],
)
def test_equals_the_best_of_all_sets(granularity, implementation, count):
    for seed in range(2 if granularity == "module" and count == 2 else 6):
        case = small_case(seed, count, granularity, implementation)
        knapsacks, span, random = Knapsacks(case), Span(0, count + 1), Random(seed)
        found = []
        for again in every_set(case, range(count)):
            extra = sum(float(case.times.again(layer, again)) for layer in range(count))
            held = [Held(case.stage(span), 2)]
            found.append((round(extra, 12), case.memory.rank(0, held, again).total_bytes))
        least, most = min(size for _, size in found), max(size for _, size in found)
        assert most == knapsacks.bytes(0, (span,))
        for share in (0.0, *(random.random() for _ in range(6)), 1.0):
            limit = int(least + share * (most - least))
            choice = knapsacks.choose(0, (span,), limit)
            best = min((each for each in found if each[1] <= limit), default=None)
            assert choice and best and choice.bytes <= limit
            assert round(choice.seconds, 9) == pytest.approx(best[0], abs=2e-9)
            assert choice.bytes == knapsacks.bytes(0, (span,), choice.recompute)
        assert knapsacks.choose(0, (span,), least - 1) is None


def random_kinds(random: Random) -> list[Kind]:
    kinds, first = [], 0
    for chunk in (0, 0, 1):
        options = [Option(frozenset(), 0.0, 0, 0)]
        options += [Option(frozenset(), random.uniform(0.1, 2), random.randrange(10, 999), 0) for _ in range(9)]
        count = random.randint(1, 3)
        kinds.append(Kind.of(chunk, tuple(range(first, first + count)), undominated(options)))
        first += count
    return kinds


def cheapest(kinds: list[Kind], count: tuple[int, int], wanted: int) -> float:
    """Seconds of the best of all sets: those of them, after each layer, that are not worse than another."""
    front = [(0.0, 0)]
    for kind in kinds:
        for _ in kind.layers:
            more = sorted(
                (seconds + option.seconds, -freed - count[kind.chunk] * option.freed)
                for seconds, freed in front
                for option in kind.options
            )
            front, most = [], -1
            for seconds, less in more:
                if -less > most:
                    front.append((seconds, -less))
                    most = -less
    return min(seconds for seconds, freed in front if freed >= wanted)


def freed(kinds: list[Kind], count: tuple[int, int], levels: list[list[int]]) -> int:
    return sum(
        count[kind.chunk] * n * option.freed
        for kind, level in zip(kinds, levels, strict=True)
        for option, n in zip(kind.options, level, strict=True)
    )


def test_at_most_one_step_dearer_than_the_best():
    gaps = []
    for seed in range(40):
        random = Random(seed)
        kinds, count = random_kinds(random), (random.randint(1, 4), random.randint(1, 4))
        most = sum(count[kind.chunk] * len(kind.layers) * kind.options[-1].freed for kind in kinds)
        wanted = int(most * random.uniform(0.05, 1))
        levels = fill(kinds, [count], [wanted])
        assert levels and [sum(level) for level in levels] == [len(kind.layers) for kind in kinds]
        assert freed(kinds, count, levels) >= wanted
        seconds = sum(
            n * o.seconds
            for kind, level in zip(kinds, levels, strict=True)
            for n, o in zip(level, kind.options, strict=True)
        )
        step = max(kind.options[b].seconds - kind.options[a].seconds for kind in kinds for _, a, b in kind.steps)
        best = cheapest(kinds, count, wanted)
        assert best - 1e-9 <= seconds <= best + step
        gaps.append(seconds / best - 1)
        assert fill(kinds, [count], [most + 1]) is None
    assert sum(gaps) / len(gaps) < 0.03


def test_several_moments_are_all_served():
    for seed in range(20):
        random = Random(seed)
        kinds = random_kinds(random)
        counts = [(random.randint(1, 5), random.randint(1, 5)) for _ in range(3)]
        most = [sum(c[k.chunk] * len(k.layers) * k.options[-1].freed for k in kinds) for c in counts]
        wanted = [int(random.uniform(0.3, 1) * each) for each in most]
        levels = fill(kinds, counts, wanted)
        assert levels
        for count, want in zip(counts, wanted, strict=True):
            assert freed(kinds, count, levels) >= want


@pytest.mark.parametrize("chunks", [1, 2])
def test_many_layers_fit_and_modules_are_never_dearer(chunks):
    schedule = {1: "1f1b", 2: "interleaved"}[chunks]
    for seed in range(3):
        cases = [small_case(seed, 12, g, schedule=schedule, chunks=chunks) for g in ("layer", "module")]
        layers, modules = map(Knapsacks, cases)
        of = (Span(0, 7),) if chunks == 1 else (Span(0, 4), Span(7, 10))
        most, least = layers.bytes(0, of), layers.fewest_bytes(0, of)
        for share in (0.2, 0.5, 0.8):
            limit = int(least + share * (most - least))
            whole, single = layers.choose(0, of, limit), modules.choose(0, of, limit)
            assert whole and single and max(whole.bytes, single.bytes) <= limit
            assert single.bytes == modules.bytes(0, of, single.recompute)
            assert single.seconds < 1.02 * whole.seconds
            assert len(single.extra) == chunks and not whole.recompute.modules


def test_options_of_a_layer():
    case = small_case(0, 3, "module")
    options = LayerOptions(case.memory.saved, case.times, "module").of(1)
    assert options[0] == Option(frozenset(), 0.0, 0, 0) and None in [o.modules for o in options]
    assert [o.seconds for o in options] == sorted(o.seconds for o in options)
    for one, other in permutations(options, 2):
        assert one.seconds < other.seconds or one.freed > other.freed or one.back < other.back
    (kind,) = LayerOptions(case.memory.saved, case.times).kinds(0, (1,))
    assert len(kind.options) == 2 and kind.steps[0][1:] == (0, 1)
    rates = [rate for rate, _, _ in LayerOptions(case.memory.saved, case.times, "module").kinds(0, (1, 3))[0].steps]
    assert rates == sorted(rates)  # layer 3 is the MTP block, which is never computed again
