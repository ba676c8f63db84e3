"""The shape's own types and bounds, as a caller from Python meets them."""

import pytest
from pydantic import ValidationError

from undertow.config.errors import ConfigError
from undertow.config.model import LARGEST, ModelConfig
from undertow.config.presets import PRESETS


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vocab_size", "256", "Input should be a valid integer"),
        ("vocab_size", 256.0, "Input should be a valid integer"),
        ("hc_mult", True, "Input should be a valid integer"),
        ("hc_eps", True, "Input should be a valid number"),
        ("vocab_size", 2**70, f"Input should be less than or equal to {LARGEST}"),
        ("hidden_size", LARGEST + 1, f"Input should be less than or equal to {LARGEST}"),
        ("index_hadamard", 1, "Input should be a valid boolean"),
    ],
)
def test_a_field_of_another_type_or_size(field, value, message):
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_preset("v4-debug", **{field: value})
    assert str(error.value) == f"preset v4-debug: {field}: {message}"
    with pytest.raises(ValidationError, match=message):
        ModelConfig.model_validate({**PRESETS["v4-debug"], field: value})


def test_rope_scaling_is_as_strict():
    with pytest.raises(ConfigError, match=r"rope_scaling\.factor: Input should be a valid number"):
        ModelConfig.from_preset("v4-debug", rope_scaling={"factor": "4"})


def test_whole_numbers_are_numbers_and_lists_are_tuples():
    ratios = list(PRESETS["v4-debug"]["compress_ratios"])
    config = ModelConfig.from_preset("v4-debug", rope_theta=10000, compress_ratios=ratios, rope_scaling={"factor": 4})
    assert (config.rope_theta, config.compress_ratios, config.rope_scaling.factor) == (10000.0, tuple(ratios), 4.0)


def test_a_window_beyond_the_positions():
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_preset("v4-debug", sliding_window=4097)
    assert str(error.value) == "preset v4-debug: sliding_window 4097 exceeds max_position_embeddings 4096"
    assert ModelConfig.from_preset("v4-debug", sliding_window=4096).sliding_window == 4096
