"""Steps that are benched: seeded tokens, sizes, curves that are compared, and what is refused."""

import json

import numpy as np
import pytest

from undertow.bench.settings import build, random_text, resolve_step, value_of
from undertow.bench.step import SETTLING, apart, bench_step
from undertow.config.errors import ConfigError, InputError


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
    first, second = result["settings"].values()
    assert list(result["settings"]) == ["recompute.layers=none", "recompute.layers=all"]
    assert (result["order"], result["tokens"]) == ("in turns", 64)
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


def test_curves_leave_out_what_a_step_skipped():
    found = apart([1.0, 2.0, None, 4.0], [1.5, 2.0, 3.0, 3.75])
    assert found == {"steps": 3, "most": 0.5, "mean": 0.25, "last": 0.25}
    assert apart([None], [1.0]) == {"steps": 0, "most": None, "mean": None, "last": None}


def test_what_has_no_effect_is_refused():
    resolved = resolve_step("v4-debug", ["device=cpu", "data.validation_fraction=0.3"], 3, False, {})
    with pytest.raises(ConfigError, match=r"data\.validation_fraction"):
        build(resolved, 3)


@pytest.mark.parametrize("word", ["train.steps=5", "model.preset=v4-tiny"])
def test_keys_of_options_are_refused(word):
    with pytest.raises(InputError, match="the bench sets this key"):
        resolve_step("v4-debug", [word], 3, False, {})


def test_values_of_keys():
    config = resolve_step("v4-debug", ["ops.linear=reference"], 3, False, {}).config
    assert value_of(config, "ops.linear") == "reference" and value_of(config, "ops.rms_norm") == "auto"
    assert value_of(config, "train.batch_size") == 2
