"""Keys of how a run is shared out over GPUs: widths, the layout of its pipeline and the order of its operations."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from undertow.config.scalars import told
from undertow.config.section import Section

WIDEST = 10**6  # more ranks than any axis has
UNBUILT_AXES: tuple[str, ...] = ("tensor", "context")
"""Axes that can be planned and not yet run."""

LayoutItem = Literal["embedding", "decoder", "mtp", "loss"]
Schedule = Literal["1f1b", "interleaved", "zb-h1", "zbv"]


def _layout(value: Any) -> Any:
    """The shape alone; whoever uses a layout knows the model that it has to suit."""
    if value is None or (isinstance(value, str) and value):
        return value
    stages = value if isinstance(value, list) and value else [None]
    if all(isinstance(stage, list) and stage and set(map(str, stage)) <= {*get_args(LayoutItem)} for stage in stages):
        return value
    raise ValueError(
        f"{told(value)} is no layout; write 'Et*10|t*12|t*12|t*9mL', or a list of stages, each a list of "
        f"{', '.join(get_args(LayoutItem))}"
    )


class ParallelConfig(Section):
    """Ranks of each axis; data parallelism takes the GPUs that they leave. `undertow plan` chooses what is not set."""

    gpus: str | None = Field(
        None,
        pattern=r"^[1-9][0-9]{0,6}[xX][A-Za-z][\w-]*$",
        description="GPUs that widths and layout are for, as 32xMI355X; null leaves them to the command line",
    )
    tensor: int = Field(1, ge=1, le=WIDEST, description="ranks that share each weight matrix")
    pipeline: int = Field(1, ge=1, le=WIDEST, description="ranks that share the layers, one after the other")
    expert: int = Field(1, ge=1, le=WIDEST, description="ranks of a stage that share the experts")
    context: int = Field(1, ge=1, le=WIDEST, description="ranks that share each sequence")
    shard: int | None = Field(
        None,
        ge=1,
        le=WIDEST,
        description="data-parallel ranks that hold weights and optimizer state in parts; null is all of them, and with "
        "1 each holds them whole",
    )
    layout: Annotated[str | list[list[LayoutItem]] | None, BeforeValidator(_layout)] = Field(
        None,
        description="what is on each pipeline stage, as 'Et*10|t*12|t*12|t*9mL' or as lists of embedding, decoder, mtp "
        "and loss; null spreads layers evenly",
    )
    schedule: Schedule = Field(
        "1f1b", description="order of forward and backward passes over the stages: 1f1b, interleaved, zb-h1 or zbv"
    )
    timeout: float = Field(
        300.0,
        gt=0,
        le=86400,
        description="seconds for which a rank may give no sign of life, or all ranks together not move, before the run "
        "ends and names who held it up",
    )
