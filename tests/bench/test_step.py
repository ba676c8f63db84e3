"""Steps that are benched: seeded tokens, sizes, curves that are compared, and what is refused."""

import json
import re

import numpy as np
import pytest

from undertow.bench.settings import build, random_text, resolve_step, value_of
from undertow.bench.step import SETTLING, apart, bench_step
from undertow.bench.table import step_table
from undertow.config.errors import ConfigError, InputError
from undertow.ops import registry


def test_random_text_is_seeded_skewed_and_enough():
    resolved = resolve_step("v4-debug", [], 5, False, {})
    first, again = random_text(resolved.config, 5), random_text(resolved.config, 5)
    ids = np.concatenate([np.asarray(document) for document in first.training_ids])
    assert first.training_ids.content == again.training_ids.content
    assert len(ids) == 5 * 2 * 64 and ids.max() < 256 and ids.min() >= 0
    assert (ids < 16).mean() > 3 * 16 / 256
    other = resolve_step("v4-debug", ["seed=1"], 5, False, {})
    assert random_text(other.config, 5).training_ids.content != first.training_ids.content


def test_a_large_preset_on_a_gpu_has_state_of_ten_bytes():
    config = resolve_step("v4-proxy", ["train.sequence_length=8192"], 13, True, {}).config
    train = config.train
    assert (train.batch_size, train.sequence_length, train.steps) == (1, 8192, 13)
    assert (config.numerics.dtype, train.state_profile, train.optimizer) == ("bfloat16", "bf16", "adamw")
    assert resolve_step("v4-small", [], 13, True, {}).config.train.optimizer == "muon"


def test_two_settings_in_turns(tmp_path):
    trace, seen = tmp_path / "trace.json", []
    result = bench_step(
        "v4-debug", ["device=cpu", "train.sequence_length=32"], ["recompute.layers=all"], 1, 5, trace, {},
        lambda done, of, what: seen.append((done, of)),
    )  # fmt: skip
    first, second = result["settings"]
    assert [first["name"], second["name"]] == ["recompute.layers=none", "recompute.layers=all"]
    assert (result["order"], first["tokens"], second["tokens"]) == ("in turns", 64, 64)
    assert result["ratio"] == pytest.approx(second["ms"]["median"] / first["ms"]["median"])
    assert first["calls"] == {} and first["passed_on"] == []
    assert first["steps"] == 5 - SETTLING and len(first["losses"]) == len(second["losses"]) == 5
    assert first["losses"] == second["losses"] and result["apart"]["most"] == 0.0  # recomputing changes no bit here
    assert first["losses"][0] == pytest.approx(np.log(256), rel=0.05)
    assert second["set"]["recompute.layers"] == "all" and second["set"]["train.sequence_length"] == 32
    assert first["tokens_per_second"] == pytest.approx(64e3 / first["ms"]["median"])
    assert first["tflops"]["reported"] > first["tflops"]["algorithmic"] > 0 and first["share_of_peak"] is None
    assert seen[-1] == (10, 10)
    assert json.loads(trace.read_text())["traceEvents"]
    assert list(tmp_path.iterdir()) == [trace]
    json.dumps(result, allow_nan=False)


def test_settings_of_other_tokens_are_compared_per_token_and_without_curves():
    result = bench_step("v4-debug", ["device=cpu"], ["train.batch_size=4"], 1, 0, None, {})
    first, second = result["settings"]
    assert (first["tokens"], second["tokens"]) == (128, 256)
    assert second["tokens_per_second"] == pytest.approx(256e3 / second["ms"]["median"])
    assert result["ratio"] == pytest.approx(second["ms"]["median"] / first["ms"]["median"] / 2)
    assert "apart" not in result
    table = step_table(result)
    assert re.search(r"^tokens a step +128 +256$", table, re.MULTILINE)
    assert f"takes {result['ratio']:.3f} of the time per token of train.batch_size=2" in table
    assert "losses are of other tokens, and not compared" in table


def test_calls_are_counted_by_the_backend_that_took_them(monkeypatch):
    monkeypatch.setattr(registry, "machine", lambda device: registry.Machine("cuda", "sm_90"))
    words = ["device=cpu", "numerics.dtype=float32", "optimizations.fusion=off", "optimizations.grouped_gemm=off"]
    result = bench_step("v4-debug", words, [], 1, 0, None, {})
    (found,) = result["settings"]
    assert "sparse_attention, csa_attention by triton (bfloat16; " in found["operators"]
    kinds = resolve_step("v4-debug", [], 1, False, {}).config.model
    choosing = sum(ratio == kinds.csa_ratio for ratio in kinds.compress_ratios)
    assert found["calls"]["csa_attention"] == {"reference": 4 * choosing}
    assert found["passed_on"][0] == (
        "sparse_attention, csa_attention by reference instead of triton: the kernels compute in bfloat16, not float32"
    )
    told = f"operators of as given: .*csa_attention {4 * choosing} by reference; .*; all other calls by reference"
    assert re.search(told, step_table(result))


def test_curves_leave_out_what_a_step_skipped():
    found = apart([1.0, 2.0, None, 4.0], [1.5, 2.0, 3.0, 3.75])
    assert found == {"steps": 3, "most": 0.5, "mean": 0.25, "last": 0.25}
    assert apart([None], [1.0]) == {"steps": 0, "most": None, "mean": None, "last": None}


def test_what_has_no_effect_is_refused():
    resolved = resolve_step("v4-debug", ["device=cpu", "data.validation_fraction=0.3"], 3, False, {})
    with pytest.raises(ConfigError, match=r"data\.validation_fraction"):
        build(resolved, 3)


def test_schedules_are_refused():
    with pytest.raises(InputError, match=r"all steps of a bench have one size; set train\.batch_size$"):
        resolve_step("v4-debug", ["train.batch_size_schedule=[[1, 4]]"], 3, False, {})


@pytest.mark.parametrize("word", ["train.steps=5", "model.preset=v4-tiny"])
def test_keys_of_options_are_refused(word):
    with pytest.raises(InputError, match="the bench sets this key"):
        resolve_step("v4-debug", [word], 3, False, {})


def test_values_of_keys():
    config = resolve_step("v4-debug", ["ops.linear=reference"], 3, False, {}).config
    assert value_of(config, "ops.linear") == "reference" and value_of(config, "ops.rms_norm") == "auto"
    assert value_of(config, "train.batch_size") == 2


def test_an_interrupted_bench_keeps_the_steps_it_took():
    kept = []

    def follow(done: int, of: int, what: str) -> None:
        if done == SETTLING + 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench_step("v4-debug", ["device=cpu", "train.sequence_length=32"], [], 9, 0, None, {}, follow, kept.append)
    (setting,) = kept[0]["settings"]
    assert len(kept) == 1 and setting["steps"] == 2 and len(setting["losses"]) == SETTLING + 2
