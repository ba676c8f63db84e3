"""What is planned: a model with the planner's defaults around it, or the configuration of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from undertow.config.errors import ConfigError
from undertow.config.model import ModelConfig
from undertow.config.paths import recipe_names
from undertow.config.presets import PRESETS, nearest
from undertow.config.resolve import resolve
from undertow.config.scalars import told
from undertow.config.schema import RunConfig

SEQUENCE_LENGTH, SEQUENCES_PER_GPU, MICRO_BATCH = 4096, 8, 1
_PREFIX = "UNDERTOW__"


class Subject(NamedTuple):
    """A configuration under the name it was given by; `recipe` says that it is a run's, not a model with defaults.
    `words` are the `KEY=VALUE` that changed it."""

    name: str
    run: RunConfig
    recipe: bool
    words: tuple[str, ...] = ()


def read_subject(
    given: str | Path | ModelConfig | RunConfig, gpus: int, overrides: Sequence[str], environment: Mapping[str, str]
) -> Subject:
    """A preset, a recipe (name or file), a model directory, its `config.json`, or a configuration as an object.

    A model alone is planned in bfloat16, in sequences of 4,096 tokens, one a forward pass and 8 a GPU and step, unless
    `overrides` (`key=value`) or `environment` say otherwise. Raises `ConfigError`.
    """
    if isinstance(given, ModelConfig | RunConfig):
        _refuse(overrides, "a configuration as an object")
        if isinstance(given, RunConfig):
            return Subject("run", given, True)
        return Subject("model", _around(given, gpus), False)
    text = str(given)
    if text in PRESETS:
        length = min(SEQUENCE_LENGTH, ModelConfig.from_preset(text).max_position_embeddings)
        defaults = {f"{_PREFIX}{key}": value for key, value in _defaults(length, gpus).items()}
        words = [f"model.preset={text}", *overrides]
        return Subject(text, resolve(None, words, {**defaults, **environment}).config, False, tuple(overrides))
    if os.path.isdir(text) or text.endswith(".json"):
        _refuse(overrides, text)
        return Subject(text, _around(ModelConfig.from_json(text), gpus), False)
    if not os.path.isfile(text) and Path(text).with_suffix("").as_posix() not in recipe_names():
        known = [*PRESETS, *recipe_names()]
        raise ConfigError(
            f"no preset, recipe or model directory {told(text)}{nearest(text, known)} (presets and recipes: "
            f"{', '.join(known)})"
        )
    return Subject(text, resolve(text, overrides, environment).config, True, tuple(overrides))


def _defaults(length: int, gpus: int) -> dict[str, str]:
    """As variables, which the command line and real variables of the same name win over."""
    return {
        "NUMERICS__DTYPE": "bfloat16",
        "TRAIN__SEQUENCE_LENGTH": str(length),
        "TRAIN__MICRO_BATCH_SIZE": str(MICRO_BATCH),
        "TRAIN__BATCH_SIZE": str(SEQUENCES_PER_GPU * gpus),
    }


def _around(model: ModelConfig, gpus: int) -> RunConfig:
    train = {
        "sequence_length": min(SEQUENCE_LENGTH, model.max_position_embeddings),
        "micro_batch_size": MICRO_BATCH,
        "batch_size": SEQUENCES_PER_GPU * gpus,
    }
    return RunConfig.model_validate({"model": model, "train": train, "numerics": {"dtype": "bfloat16"}})


def _refuse(overrides: Sequence[str], what: str) -> None:
    if overrides:
        raise ConfigError(f"{overrides[0]}: KEY=VALUE changes a preset or a recipe, not {what}")
