"""What cannot go together, in sentences that say what, why and which key to change."""

import pytest

from undertow.config.conflicts import CONDITIONS, PAIRS, conflicts, excluded, warnings
from undertow.config.layer import flat
from undertow.config.optimizations import FAMILIES
from undertow.config.resolve import resolve

FLASH = "pretrain/flash-32xMI355X"


def of(*words: str, node: int = 8) -> tuple[str, ...]:
    return conflicts(resolve(FLASH, words, {}).config, node)


def test_tables_name_families_and_keys_that_exist():
    keys = flat(resolve(FLASH, [], {}).config.model_dump())
    assert {name for pair in PAIRS for name in pair} | {each.family for each in CONDITIONS} <= set(FAMILIES)
    assert {each.key for each in CONDITIONS} <= set(keys)


def test_the_published_run_has_none():
    assert of() == ()


def test_families_that_exclude_each_other():
    assert of("optimizations.dispatch=on") == (
        "optimizations.mega_moe and optimizations.dispatch are both on: mega_moe exchanges tokens in its own kernel, "
        "which leaves dispatch nothing to do; set optimizations.dispatch=off, or optimizations.mega_moe=off",
    )
    assert of("optimizations.grouped_gemm=on") == (
        "optimizations.mega_moe and optimizations.grouped_gemm are both on: mega_moe multiplies by the experts in its "
        "own kernel, which leaves grouped_gemm nothing to do; set optimizations.grouped_gemm=off, or "
        "optimizations.mega_moe=off",
    )
    assert excluded({"mega_moe", "fp8", "dispatch"}) == (("mega_moe", "dispatch"), ("mega_moe", "fp8"))
    assert excluded(set(FAMILIES) - {"mega_moe"}) == ()


@pytest.mark.parametrize(
    ("word", "start"),
    [
        ("parallel.tensor=2", "optimizations.mega_moe is on and parallel.tensor is 2: it takes whole experts; set "),
        ("parallel.expert=16", "optimizations.mega_moe is on and parallel.expert is 16: its kernel writes to the GPUs"),
        ("parallel.expert=1", "optimizations.mega_moe is on and parallel.expert is 1: its kernel writes to the GPUs"),
        ("parallel.expert=7", "optimizations.mega_moe is on and parallel.expert is 7: every rank must hold as many"),
        ("train.z_loss_weight=0.1", "optimizations.mega_moe is on and train.z_loss_weight is 0.1: it has the plain"),
        ("train.bias_update_rate=0.1", "optimizations.mega_moe is on and train.bias_update_rate is 0.1: it has no"),
        ("parallel.pipeline=1", "optimizations.layout is on and parallel.pipeline is 1: one stage has all layers; set"),
        ("parallel.layout=null", "optimizations.layout is on and parallel.layout is null: there is none to follow; se"),
    ],
)
def test_conditions_that_are_not_met(word, start):
    (sentence,) = of(word)
    assert sentence.startswith(start) and "; set optimizations." in sentence


def test_experts_stay_within_a_node():
    assert of(node=8) == ()
    (sentence,) = of(node=4)
    assert sentence == (
        "optimizations.mega_moe is on and parallel.expert is 8: its kernel writes to the GPUs of one node, up to 8; "
        "set optimizations.mega_moe=off, or parallel.expert to 2 to 8, within a node"
    )


def test_dispatch_needs_somebody_to_send_to():
    config = resolve("pretrain/small", ["optimizations.dispatch=on"], {}).config
    assert conflicts(config) == (
        "optimizations.dispatch is on and parallel.expert is 1: there is nobody to send tokens to; set "
        "optimizations.dispatch=off, or parallel.expert to 2 or more",
    )


def test_warnings_of_the_clamp_and_of_an_indexer_that_rests():
    clamp, indexer = warnings(resolve(FLASH, [], {}).config)
    assert "model.swiglu_limit 10 does not bound routed experts" in clamp
    assert indexer.startswith("indexer.frozen is true in a run from scratch")
    assert warnings(resolve("pretrain/quickstart", [], {}).config) == ()
    assert warnings(resolve("pretrain/quickstart", ["indexer.frozen=true", "init_from=a"], {}).config) == ()
