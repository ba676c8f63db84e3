"""A candidate as YAML that a recipe takes."""

from __future__ import annotations

from undertow.planner.geometry import Batch, Geometry
from undertow.planner.memory.recompute import Recompute
from undertow.planner.pipeline.layout import Layout
from undertow.planner.pipeline.schedules import ScheduleName


def fragment_of(layout: Layout, schedule: ScheduleName, geometry: Geometry, batch: Batch, recompute: Recompute) -> str:
    """The sections `train`, `parallel` and `recompute` of a recipe, with all that was chosen."""
    whole, modules = sorted(recompute.layers), recompute.by_module
    lines = [
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
