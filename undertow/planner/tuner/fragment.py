"""A candidate as YAML that a recipe takes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from undertow.config.layout import Layout
from undertow.planner.geometry import Batch, Geometry
from undertow.planner.memory.recompute import Recompute
from undertow.planner.pipeline.schedules import ScheduleName

FILE = "FILE"
_RESTATED = ("train.batch_size", "train.micro_batch_size", "train.sequence_length", "parallel.", "recompute.")


class Origin(NamedTuple):
    """What was tuned: the `preset` (None for a recipe or a configuration), its `dtype`, and `said`, the rest of the
    command that plans the recipe again."""

    preset: str | None
    dtype: str
    said: str

    def command(self, file: str) -> str:
        """The command, of a recipe in this file."""
        return f"undertow plan {file} {self.said}"


def said_again(words: Sequence[str], gpus: str, options: Mapping[str, str | bool | None]) -> str:
    """Arguments of a command line: `KEY=VALUE` words, but for those that a fragment restates, and options that are
    given."""
    kept = [shlex.quote(word) for word in words if not word.startswith(_RESTATED)]
    for name, value in options.items():
        if value:
            kept += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return " ".join([*kept, "--gpus", gpus])


def fragment_of(
    layout: Layout,
    schedule: ScheduleName,
    geometry: Geometry,
    batch: Batch,
    recompute: Recompute,
    origin: Origin | None = None,
    file: str = FILE,
) -> str:
    """The sections `train`, `parallel` and `recompute` of a recipe, with all that was chosen, and with an `origin`
    `model` and `numerics`, too, and a comment on how to plan it again from a `file`."""
    whole, modules = sorted(recompute.layers), recompute.by_module
    lines = [
        *(_head(origin, file) if origin else []),
        "train:",
        f"  batch_size: {batch.size}",
        f"  micro_batch_size: {batch.micro_batch}",
        f"  sequence_length: {batch.sequence_length}",
        "parallel:",
        f"  tensor: {geometry.tensor}",
        f"  pipeline: {geometry.pipeline}",
        f"  expert: {geometry.expert}",
        f"  context: {geometry.context}",
        f'  layout: "{layout}"',
        f"  schedule: {schedule}",
        "recompute:",
        f"  layers: {whole or 'none'}",
        "  modules:" if modules else "  modules: {}",
        *(f"    {module}: {list(layers)}" for module, layers in modules.items()),
    ]
    return "\n".join(lines) + "\n"


def _head(origin: Origin, file: str) -> list[str]:
    told = f"# Implementation and state are options of the command, not of a recipe: {origin.command(file)}"
    model = [f"model: {origin.preset}"] if origin.preset else []
    return [told, *model, "numerics:", f"  dtype: {origin.dtype}"]
