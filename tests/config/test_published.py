"""The six published switches as families, the ladder's rungs, and the committed tables of all positions."""

from itertools import product

import pytest

from tests.config.switch_tables import FAMILIES_FILE, PUBLISHED_FILE, family_rows, published_rows, text
from undertow.config.conflicts import conflicts
from undertow.config.optimizations import FAMILIES
from undertow.config.published import (
    RUNGS,
    SWITCHES,
    asks_by_name,
    families_of,
    families_on,
    nearest_rung,
    words_of,
)
from undertow.config.resolve import resolve

FLASH = "pretrain/flash-32xMI355X"
EVEN = (10, 11, 11, 11)


def on(**switches: bool) -> set[str]:
    given = dict.fromkeys(SWITCHES, False) | switches
    return {family for family, position in families_of(given).items() if position == "on"}


@pytest.mark.parametrize(("file", "rows"), [(FAMILIES_FILE, family_rows), (PUBLISHED_FILE, published_rows)])
def test_committed_table_is_what_the_switches_give(file, rows):
    assert file.read_text(encoding="utf-8") == text(rows())


def test_tables_have_every_vector():
    assert len(list(family_rows())) == 1 + 2 ** len(FAMILIES) == 257
    assert len(list(published_rows())) == 1 + 2 ** len(SWITCHES) == 65


def test_mega_moe_holds_off_the_switches_that_it_replaces():
    assert on(MEGA_MOE=True, DEEPEP=True, SYNC_FREE=True, LAYOUT=True) == {"mega_moe", "layout"}
    assert on(SYNC_FREE=True, LAYOUT=True) == {"dispatch", "layout"}
    assert on(DEEPEP=True, LAYOUT=True) == {"dispatch", "grouped_gemm", "layout"}
    assert "fp8" not in on(**dict.fromkeys(SWITCHES, True))


@pytest.mark.parametrize(
    ("rung", "switches"),
    [
        (0, ""),
        (1, "FUSION"),
        (3, "FUSION ATTENTION"),
        (5, "FUSION ATTENTION DEEPEP"),
        (6, "FUSION ATTENTION MEGA_MOE"),
        (7, "FUSION ATTENTION DEEPEP SYNC_FREE MEGA_MOE LAYOUT"),
    ],
)
def test_rungs_are_their_published_vectors(rung, switches):
    families = on(**dict.fromkeys(switches.split(), True))
    assert RUNGS[rung].families == families
    assert nearest_rung(families) == (RUNGS[rung], {}, False)


def test_no_flags_are_the_top_rung():
    assert nearest_rung([name for name, position in families_of({}).items() if position == "on"]).rung.number == 7


def test_a_backend_by_name_is_the_second_rung_and_products_held_off_the_fourth():
    attention = {"fusion", "attention", "recompute"}
    assert nearest_rung(attention, named_backend=True)[0].number == 2
    assert nearest_rung(attention)[0].number == 3
    assert nearest_rung(attention | {"dispatch"}) == (RUNGS[4], {}, False)
    assert nearest_rung(RUNGS[7].families, named_backend=True) == (RUNGS[7], {}, True)
    assert nearest_rung({"fusion", "attention", "grouped_gemm", "fp8"}) == (
        RUNGS[5],
        {"dispatch": "off", "recompute": "off", "fp8": "on"},
        False,
    )


def test_every_published_vector_resolves_in_the_published_recipe():
    for positions in product((False, True), repeat=len(SWITCHES)):
        switches = dict(zip(SWITCHES, positions, strict=True))
        config = resolve(FLASH, words_of(switches, EVEN), {}).config
        assert conflicts(config) == ()
        assert config.optimizations.model_dump() == families_of(switches)
        assert config.attention.backend == ("auto" if switches["ATTENTION"] else "reference")
        assert config.parallel.layout == ("Et*10|t*12|t*12|t*9mL" if switches["LAYOUT"] else None)
        firsts = [0, 1, 2, 10, 11, 12, 21, 22, 23, 32, 33, 34]
        assert config.recompute.layers == ("none" if switches["LAYOUT"] else firsts)
        effect = families_on(config, tuned_layout=config.parallel.layout is not None)
        assert effect == {family for family, position in families_of(switches).items() if position == "on"}


def test_families_count_by_their_keys():
    words = ["attention.backend=reference", "attention.csa_backend=reference", "recompute.layers=[3]"]
    config = resolve(FLASH, words, {}).config
    assert families_on(config, tuned_layout=False) == {"fusion", "mega_moe", "recompute"}
    assert not asks_by_name(config)
    assert asks_by_name(resolve(FLASH, ["attention.csa_backend=triton"], {}).config)
