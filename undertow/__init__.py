"""Undertow: plan, pretrain, improve by reinforcement learning and serve DeepSeek-V4-family models.

The names below are loaded on first use, so that `import undertow` and the command line's `--help` cost no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from undertow.checkpoint.directory import load_model, save_model
    from undertow.config.model import ModelConfig
    from undertow.engine.llm import LLM
    from undertow.engine.sampling import SamplingParams
    from undertow.model.build import build_model
    from undertow.planner.plan import plan

__version__ = "0.1.0"

__all__ = ["LLM", "ModelConfig", "SamplingParams", "__version__", "build_model", "load_model", "plan", "save_model"]

_HOMES = {
    "LLM": "undertow.engine.llm",
    "ModelConfig": "undertow.config.model",
    "SamplingParams": "undertow.engine.sampling",
    "build_model": "undertow.model.build",
    "load_model": "undertow.checkpoint.directory",
    "plan": "undertow.planner.plan",
    "save_model": "undertow.checkpoint.directory",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'undertow' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
