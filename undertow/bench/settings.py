"""Settings of a step that is benched: a preset with sizes that suit the machine, on seeded random tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from undertow.config.errors import InputError
from undertow.config.optimizations import refuse_unbuilt
from undertow.config.presets import PRESETS, nearest
from undertow.config.resolve import Resolved, resolve
from undertow.config.schema import RunConfig
from undertow.config.world import World
from undertow.data.store import TokenStore
from undertow.data.tokenizer import SHIPPED, Tokenizer
from undertow.ops.registry import OPS
from undertow.parallel.mesh import build_mesh
from undertow.train.fit import check_fit
from undertow.train.loop import Trainer
from undertow.train.start import device_of, trainer_of
from undertow.train.text import Text
from undertow.train.widths import refuse_wider

_ROWS = {"v4-debug": (2, 64), "v4-tiny": (2, 512), "v4-small": (8, 2048)}
_LARGE_ROWS = (1, 4096)
# Muon's iteration costs as much however few tokens a step has, so one sequence would time little else.
_LARGE = (
    "train.state_profile=bf16",
    "train.optimizer=adamw",
    "train.learning_rate=1e-4",
    "train.min_learning_rate=1e-5",
)
_FLATTENED = 16  # ranks that the most frequent tokens are about as frequent as


def default_preset(device: torch.device) -> str:
    """The preset where none is named."""
    return "v4-proxy" if device.type == "cuda" else "v4-tiny"


def device_for(words: Sequence[str], environment: Mapping[str, str], world: World | None = None) -> torch.device:
    """The device that `words` (KEY=VALUE) and variables ask for, on which the sizes of a step depend."""
    asked = [word for word in words if word.partition("=")[0].strip() == "device"]
    return device_of(resolve(None, ["model.preset=v4-debug", *asked], environment).config.device, world)


def resolve_step(preset: str, words: Sequence[str], steps: int, gpu: bool, environment: Mapping[str, str]) -> Resolved:
    """The configuration of `steps` steps of a preset; `words` (KEY=VALUE) win over what the bench sets itself.

    Raises `InputError` for an unknown preset or operator, for keys that an option of the bench sets, and for schedules
    of sizes.
    """
    if preset not in PRESETS:
        raise InputError(f"preset {preset}: unknown{nearest(preset, list(PRESETS))} (presets: {', '.join(PRESETS)})")
    for word in words:
        if word.partition("=")[0].strip() in ("train.steps", "model.preset"):
            raise InputError(f"{word}: the bench sets this key; name the preset first, and give --steps")
        if word.partition("=")[0].strip() in ("train.batch_size_schedule", "train.sequence_length_schedule"):
            raise InputError(f"{word}: all steps of a bench have one size; set {word.partition('_schedule')[0]}")
    rows, length = _ROWS.get(preset, _LARGE_ROWS)
    own = [f"train.batch_size={rows}", f"train.sequence_length={length}", "train.warmup_steps=5"]
    own += ["numerics.dtype=bfloat16"] if gpu else []
    own += _LARGE if gpu and preset not in _ROWS else []
    found = resolve(None, [f"model.preset={preset}", *own, *words, f"train.steps={steps}"], environment)
    for op in found.config.ops:
        if op not in OPS:
            raise InputError(f"ops.{op}: unknown{nearest(op, list(OPS))} (operators: {', '.join(OPS)})")
    return found


def random_text(config: RunConfig, steps: int) -> Text:
    """Seeded random tokens, one document a sequence, enough for `steps` steps.

    Frequent and rare ones as in text: probability goes as 1 / (rank + 16), so that there is something to learn.
    """
    train, vocabulary = config.train, config.model.vocab_size
    generator = np.random.default_rng(config.seed)
    total = np.cumsum(1.0 / (np.arange(vocabulary) + _FLATTENED))
    draws = generator.random((steps * train.batch_size, train.sequence_length))
    ids = np.searchsorted(total, draws * total[-1]).clip(max=vocabulary - 1).astype(np.uint32)
    # Only tokens are read of it; the tokenizer stands for one.
    return Text(Tokenizer.from_name(next(iter(SHIPPED))), TokenStore.of(list(ids)), TokenStore.of(list(ids[:1])))


def build(resolved: Resolved, steps: int, world: World | None = None) -> tuple[Trainer, str | None]:
    """The trainer of a run at its beginning, and a warning where its step may not fit; over the processes of `world`,
    which have met, that of this one's part.

    Raises `InputError` for what cannot run or has no effect, `DoesNotFit` where the state alone exceeds the memory.
    """
    config = resolved.tracked
    refuse_unbuilt(config.optimizations)
    refuse_wider(config, 1 if world is None else world.ranks)
    device = device_of(config.device, world)
    mesh = None if world is None else build_mesh(config.parallel, model=config.model, device=device.type)
    unfit = check_fit(resolved.config, device, world)
    torch.manual_seed(config.seed)
    trainer = trainer_of(config, random_text(resolved.config, steps), device, None, mesh)
    resolved.refuse_unread()
    return trainer, unfit


def value_of(config: RunConfig, key: str) -> Any:
    """The value of a dotted key, `auto` for an operator without one."""
    found: Any = config
    for name in key.split("."):
        found = found.get(name, "auto") if isinstance(found, Mapping) else getattr(found, name)
    return found
