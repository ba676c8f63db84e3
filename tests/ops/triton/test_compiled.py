"""Kernels compiled for chips that are not there: they compile, fit their shared memory, spill no register, and need
what they needed before."""

from __future__ import annotations

from copy import deepcopy

import pytest
import triton

from tests.ops.triton.compile_all import CHIPS, COMMAND, Kept, facts_of, recorded

SHARED = {"gfx942": 65536, "gfx950": 163840, "sm_90": 232448}
"""Bytes of shared memory that a block may use."""

SPILLS = {
    # 128 numbers a thread with 4 warps, where a side is no multiple of 16: 89 % of a copy's bytes a second on an H200;
    # with 8 warps nothing is spilled, and it is 82 %.
    ("sm_90", "blocks of 128x128, scales in ue8m0, odd sizes: quantise"): 400,
    ("sm_90", "blocks of 128x128, scales in float32, odd sizes: quantise"): 400,
    # The widest rows that stay in registers: 16,384 scores in 16 warps.
    ("sm_90", "best 512 of 65536: indexer_choose 4"): 32,
}
"""Bytes a thread that a kernel may spill on a chip; there is a reason for each."""


PRODUCTS = {
    *("window_forward", "window_probabilities", "dense_probabilities", "gather_probabilities", "mix_values"),
    *("window_scores", "window_keys", "pool_scores", "pool_queries", "pool_keys", "gather_scores", "gather_queries"),
    *("indexer_score", "indexer_mass", "indexer_measure"),
    *("indexer_of_queries", "indexer_of_keys", "indexer_of_chosen"),
    *("grouped_product", "grouped_outer", "symmetric_tile"),
}
"""Kernels whose work is products of matrices."""


def faults(chip: str, found: Kept) -> list[str]:
    """Kernels that a chip cannot hold, as sentences."""
    told = []
    for name, facts in found.items():
        shared, spilled, allowed = facts["shared"], facts["spilled"], SPILLS.get((chip, name), 0)
        if shared > SHARED[chip]:
            told.append(f"{chip}: {name}: takes {shared} bytes of shared memory, the chip has {SHARED[chip]}")
        if spilled > allowed:
            told.append(f"{chip}: {name}: spills {spilled} bytes of registers a thread, {allowed} are allowed")
    return told


def drift(chip: str, kept: Kept, found: Kept, complete: bool) -> list[str]:
    """What differs from the facts that the repository holds, as sentences; `complete` if all kernels were compiled."""
    told = [f"{chip}: {name}: has no recorded facts" for name in found if name not in kept]
    told += [f"{chip}: {name}: is recorded and is no more" for name in kept if complete and name not in found]
    for name, facts in found.items():
        before = kept.get(name, facts)
        told += [
            f"{chip}: {name}: {fact} was {before.get(fact)} and is {value}"
            for fact, value in facts.items()
            if before.get(fact) != value
        ]
    mend = f"; look at the change and refresh the facts with `{COMMAND} --record`"
    return [line + mend for line in told]


@pytest.mark.parametrize(
    ("chip", "which"),
    [*((chip, "few") for chip in CHIPS), *(pytest.param(chip, "all", marks=pytest.mark.slow) for chip in CHIPS)],
)
def test_ahead_of_time(chip, which):
    found = facts_of(chip, which)
    assert found and all(0 < facts["registers"] <= 512 for facts in found.values())
    assert not (told := faults(chip, found)), "\n".join(told)
    versions = recorded(chip)
    if triton.__version__ not in versions:
        known = ", ".join(sorted(versions))
        pytest.skip(f"facts are recorded for Triton {known}, not {triton.__version__}; `{COMMAND} --record` adds them")
    told = drift(chip, versions[triton.__version__], found, which == "all")
    assert not told, "\n".join(told)


@pytest.mark.parametrize("chip", CHIPS)
def test_recorded_facts_ahead_of_time(chip):
    """Of every version, they fit; and products of attention and of the indexer run on matrix units, all of them."""
    unit = "wgmma " if chip == "sm_90" else "v_mfma_f32_"
    for version, kept in recorded(chip).items():
        assert not faults(chip, kept), version
        used = {name: facts["matrix"] for name, facts in kept.items() if name.split(": ")[-1].split()[0] in PRODUCTS}
        assert {name.split(": ")[-1].split()[0] for name in used} == PRODUCTS, version
        others = [name for name, matrix in used.items() if not matrix or not all(x.startswith(unit) for x in matrix)]
        assert not others, version


def test_a_change_is_told_ahead_of_time():
    kept: Kept = {
        "a: f": {"shared": 100, "registers": 50, "spilled": 0, "matrix": {"wgmma m64n16k16": 2}},
        "b: g": {"shared": 0, "registers": 20, "spilled": 0, "matrix": {}},
    }
    found = deepcopy(kept)
    assert drift("sm_90", kept, found, True) == []
    found["a: f"]["registers"], found["a: f"]["matrix"] = 64, {}
    found["c: h"] = found.pop("b: g")
    mend = "; look at the change and refresh the facts with `python -m tests.ops.triton.compile_all --record`"
    assert drift("sm_90", kept, found, True) == [
        "sm_90: c: h: has no recorded facts" + mend,
        "sm_90: b: g: is recorded and is no more" + mend,
        "sm_90: a: f: registers was 50 and is 64" + mend,
        "sm_90: a: f: matrix was {'wgmma m64n16k16': 2} and is {}" + mend,
    ]
    assert len(drift("sm_90", kept, found, False)) == 3


def test_limits_are_told_ahead_of_time():
    found: Kept = {"a: f": {"shared": 65537, "registers": 50, "spilled": 8, "matrix": {}}}
    assert faults("gfx942", found) == [
        "gfx942: a: f: takes 65537 bytes of shared memory, the chip has 65536",
        "gfx942: a: f: spills 8 bytes of registers a thread, 0 are allowed",
    ]
    assert faults("gfx950", found) == ["gfx950: a: f: spills 8 bytes of registers a thread, 0 are allowed"]
