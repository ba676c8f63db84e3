"""A stage as torch's schedules run it: the modules that it has, and how a microbatch goes through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from undertow.model.part import Part
from undertow.model.transformer import Transformer
from undertow.parallel.mesh import Mesh

Work = Callable[[int, Tensor | None, int], Tensor]
"""`(stage, streams, microbatch)` -> what the stage sends on, or in the last one the loss. The first gets no streams."""


class Stage(nn.Module):
    """The modules of stage `number` of `model`, shared with it. Called with the streams that were received, if any,
    and the microbatch's number on the host, it does its `work`."""

    def __init__(self, number: int, model: Transformer, part: Part):
        super().__init__()
        self.number, self.part = number, part
        self.held = nn.ModuleList(_modules(model, part))
        self.work: Work = _idle

    def __call__(self, *streams: Tensor, microbatch: Tensor) -> Tensor:
        # FSDP2 puts the tensors of a call on the GPU, and reading the number there would wait for all of its work.
        return super().__call__(*streams, microbatch=int(microbatch))

    def forward(self, *streams: Tensor, microbatch: int) -> Tensor:
        return self.work(self.number, streams[0] if streams else None, microbatch)


def _idle(stage: int, streams: Tensor | None, microbatch: int) -> Tensor:
    raise RuntimeError(f"stage {stage} has no work yet")


def _modules(model: Transformer, part: Part) -> Iterator[nn.Module]:
    """Two stages of a rank that read the same matrix share it."""
    for layer in part.layers:
        yield model.layers.get_submodule(str(layer))
    if part.embedding or part.mtp:
        yield model.embed
    if part.head:
        yield from (model.hc_head, model.norm)
    if part.head or part.mtp:
        yield model.head
    if part.mtp:
        yield from model.mtp


def own_stages(model: Transformer, mesh: Mesh) -> list[Stage]:
    """The stages of this rank, chunk by chunk; none without a pipeline."""
    if mesh.stages is None:
        return []
    numbers = mesh.stages.of_rank(mesh.place("pipeline"))
    return [Stage(number, model, mesh.stages.stage(number)) for number in numbers]
