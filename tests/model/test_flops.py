"""Operations of a step against the published figures, term by term, and against plain counting."""

from __future__ import annotations

import subprocess
import sys

import pytest

from undertow.config.model import ModelConfig
from undertow.model.flops import TERMS, flops_per_token, layer_flops, step_flops

LENGTH = 4096
TOKENS = 256 * LENGTH

# PFLOP of one iteration of 256 rows, in the order of TERMS.
REPORTED = dict(zip(TERMS, (118.43, 29.08, 6.54, 19.81, 196.14, 0.22, 0.21, 6.66), strict=True))
ALGORITHMIC = dict(zip(TERMS, (29.61, 5.74, 1.64, 1.97, 49.04, 0.22, 0.21, 6.66), strict=True))


def flash(indexer: str) -> ModelConfig:
    return ModelConfig.from_preset("v4-flash", indexer=indexer)


def peta(work: dict) -> dict[str, float]:
    return {term: round(work[term].total / 1e15, 2) for term in TERMS}


def total(work: dict) -> float:
    return round(sum(term.total for term in work.values()) / 1e15, 3)


def test_published_iteration_term_by_term():
    assert peta(step_flops(flash("own_rank"), LENGTH, TOKENS).reported) == REPORTED
    assert peta(step_flops(flash("shared"), LENGTH, TOKENS).algorithmic) == ALGORITHMIC


@pytest.mark.parametrize(
    ("indexer", "reported", "algorithmic", "frozen"),
    [("own_rank", 377.103, 94.184, 93.468), ("shared", 380.705, 95.084, 93.768)],
)
def test_published_totals(indexer, reported, algorithmic, frozen):
    step = step_flops(flash(indexer), LENGTH, TOKENS)
    assert (step.indexer, total(step.reported), total(step.algorithmic)) == (indexer, reported, algorithmic)
    step = step_flops(flash(indexer), LENGTH, TOKENS, frozen_indexer=True)
    assert (total(step.reported), total(step.algorithmic)) == (reported, frozen)
    assert step.algorithmic["indexer"].backward == 0.0


@pytest.mark.parametrize(
    ("layer", "scores", "compressor", "indexer", "total"),
    [(43, 67.7, 0.0, 0.0, 2402), (4, 273.7, 68.7, 122.4, 2799), (3, 76.0, 34.4, 0.0, 2445)],
)
def test_forward_of_one_layer_in_gigaflop(layer, scores, compressor, indexer, total):
    work = layer_flops(flash("shared"), layer, LENGTH)
    giga = {term: round(value / 1e9, 1) for term, value in work.items()}
    assert giga == {
        "projections": 876.2, "scores": scores, "compressor": compressor, "indexer": indexer, "moe": 1451.7,
        "mixers": 6.4,
    }  # fmt: skip
    assert round(sum(work.values()) / 1e9) == total


def test_logits_and_backward():
    step = step_flops(flash("shared"), LENGTH, LENGTH)
    assert round(step.algorithmic["logits"].forward / 2e9) == 4338
    assert all(work.backward == 2 * work.forward for work in step.algorithmic.values())


@pytest.mark.parametrize("length", [1, 3, 7, 8, 9, 37, 64])
def test_pairs_are_counted_one_by_one(length):
    config = ModelConfig.from_preset("v4-debug")
    each = 4 * config.num_attention_heads * config.head_dim
    window = sum(min(t + 1, config.sliding_window) for t in range(length))
    chosen = sum(min((t + 1) // 4, config.index_topk) for t in range(length))
    pooled = sum((t + 1) // 8 for t in range(length))
    pairs = [layer_flops(config, layer, length)["scores"] / each for layer in (0, 2, 3)]
    assert pairs == [window, window + chosen, window + pooled]
    scored = 2 * config.index_n_heads * config.index_head_dim * sum((t + 1) // 4 for t in range(length))
    weights = 24 * 16 * 16 + 64 * 16 + 4 * 64 * 16
    assert layer_flops(config, 2, length)["indexer"] == 2 * length * weights + scored


def test_per_token_is_the_step_divided():
    config = ModelConfig.from_preset("v4-small")
    step = step_flops(config, 2048, 5 * 2048, frozen_indexer=True, mtp=False)
    algorithmic, reported = flops_per_token(config, 2048, frozen_indexer=True, mtp=False)
    assert algorithmic * 5 * 2048 == pytest.approx(sum(work.total for work in step.algorithmic.values()), rel=1e-12)
    assert reported * 5 * 2048 == pytest.approx(sum(work.total for work in step.reported.values()), rel=1e-12)


def test_without_mtp_a_block_and_half_the_logits_go():
    config = ModelConfig.from_preset("v4-debug")
    whole, trunk = (step_flops(config, 32, 32, mtp=mtp).algorithmic for mtp in (True, False))
    block = layer_flops(config, config.num_hidden_layers, 32)
    assert {term: whole[term].forward - trunk[term].forward for term in TERMS} == {
        **block, "mixers": block["mixers"] + 2 * 32 * 16 * 64, "mtp": 2 * 32 * 2 * 64 * 64, "logits": 2 * 32 * 64 * 256,
    }  # fmt: skip


def test_most_of_the_work_is_six_operations_per_active_parameter():
    algorithmic, _ = flops_per_token(flash("shared"), LENGTH, mtp=False)
    active = 13_270_091_351  # with the head, without the embedding
    assert 1.0 < algorithmic / (6 * active) < 1.1


def test_import_loads_no_torch():
    probe = "import sys, undertow.model.flops; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_dense_attention_meets_every_visible_entry():
    config = ModelConfig.from_preset("v4-tiny")
    sparse, dense = (layer_flops(config, 1, 512, dense=each) for each in (False, True))
    pairs = sum((t + 1) // 4 - min((t + 1) // 4, config.index_topk) for t in range(512))
    assert dense["scores"] - sparse["scores"] == 4 * config.num_attention_heads * config.head_dim * pairs
    assert {k: v for k, v in dense.items() if k != "scores"} == {k: v for k, v in sparse.items() if k != "scores"}
    assert layer_flops(config, 1, 512, dense=True, reported=True) == layer_flops(config, 1, 512, reported=True)


def test_an_indexer_that_rests_beside_dense_attention_does_nothing():
    config = ModelConfig.from_preset("v4-tiny")
    step = step_flops(config, 512, 512, frozen_indexer=True, dense=True)
    assert step.algorithmic["indexer"].total == 0
    assert step_flops(config, 512, 512, frozen_indexer=True).algorithmic["indexer"].forward > 0
