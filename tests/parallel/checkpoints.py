"""A state of a run that every rank can make again, and what ranks do with its checkpoints."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from torch import nn

from tests.checkpoint.conftest import random_model
from tests.model.small import small_config
from undertow.checkpoint.shares import Share, optimizer_shares, weight_shares
from undertow.checkpoint.training import Progress, load_checkpoint, save_checkpoint
from undertow.config.parallel import ParallelConfig
from undertow.model.transformer import Transformer
from undertow.parallel.mesh import build_mesh
from undertow.parallel.shard import share_out

CONFIG = small_config()
LAYOUTS = {
    "one process": (1, None, None),
    "FSDP2": (2, {}, 2),
    "DP2": (2, {}, 1),
    "EP2": (2, {"expert": 2}, 1),
    "EP2 x FSDP2": (4, {"expert": 2}, 2),
    "EP4 x FSDP4": (4, {"expert": 4}, 4),
    "HSDP 2x2": (4, {}, 2),
    "PP2": (2, {"pipeline": 2}, 1),
    "PP2, 2 stages each": (2, {"pipeline": 2, "schedule": "interleaved", "layout": "E|t|tt|mL"}, 1),
    "PP2 x EP2": (4, {"pipeline": 2, "expert": 2}, 1),
    "PP2 x FSDP2": (4, {"pipeline": 2}, 2),
}
"""Ranks, widths and `shard` of some layouts."""
SEED = 5  # of rank 0
IDLE = "norm.weight"  # never had a gradient


def whole_state(dtype: torch.dtype) -> tuple[Transformer, dict[str, torch.Tensor]]:
    """A model and the state of its optimizer, by name: of several kinds."""
    model, moments = random_model(CONFIG, dtype), {}
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parts = {"step": torch.tensor(3.0)} if parameter.dim() == 1 else {}
        parts["exp_avg"] = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if parameter.dtype == torch.bfloat16:
            parts["remainder"] = torch.randint(-32768, 32767, parameter.shape, generator=generator).short()
        if name != IDLE:
            moments |= {f"{name}/{part}": value for part, value in parts.items()}
    return model, moments


class Run:
    """A model of one layout with an optimizer; `filled` as `whole_state` has it, else otherwise."""

    def __init__(self, layout: str, filled: bool, dtype: torch.dtype = torch.float32):
        _, widths, shard = LAYOUTS[layout]
        self.whole, self.moments = whole_state(dtype)
        self.mesh = None if widths is None else build_mesh(ParallelConfig(**widths), shard, CONFIG)
        part = None if self.mesh is None else self.mesh.part
        self.model = Transformer(CONFIG, dtype=dtype, part=part)
        if self.mesh is not None:
            share_out(self.model, self.mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if filled:
            self.fill()

    @torch.no_grad()
    def fill(self) -> None:
        shares, state = weight_shares(self.model, self.mesh), self.whole.state_dict()
        parameters: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        for name, share in shares.items():
            share.tensor.copy_(part_of(state[name], share))
        for key, value in self.moments.items():
            name, _, part = key.rpartition("/")
            if name not in parameters:
                continue
            self.optimizer.state[parameters[name]][part] = part_of(value, shares[name]).clone()

    def save(self, folder: Path, step: int = 3) -> Path:
        return save_checkpoint(folder, self.model, self.optimizer, Progress(step, 300, {"epoch": 1}), mesh=self.mesh)

    def load(self, path: Path) -> Progress:
        return load_checkpoint(path, self.model, self.optimizer, self.mesh)

    def differences(self) -> list[str]:
        """What this rank holds otherwise than `whole_state` says, and what it lacks or has too much of."""
        shares = weight_shares(self.model, self.mesh)
        state = self.whole.state_dict() | self.moments
        held = shares | optimizer_shares(self.model, self.optimizer, shares)
        wanted = [key for key in state if key.rpartition("/")[0] in shares or key in shares]
        odd = sorted(held.keys() ^ set(wanted))
        return odd + [
            name for name in held.keys() - odd if not _same(held[name].tensor, part_of(state[name], held[name]))
        ]


def part_of(whole: torch.Tensor, share: Share) -> torch.Tensor:
    """The rows of a tensor that a share has."""
    return whole[share.rows] if whole.dim() else whole


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def written(layout: str, folder: Path, dtype: torch.dtype = torch.float32) -> str:
    """Save a filled run; the random state of each rank is its own."""
    run = Run(layout, True, dtype)
    torch.manual_seed(SEED + (run.mesh.rank if run.mesh else 0))
    return str(run.save(folder))


def read(layout: str, path: Path, dtype: torch.dtype = torch.float32) -> tuple[list[str], Progress, float]:
    """What differs after loading, how far the run was, and the next random number."""
    run = Run(layout, False, dtype)
    torch.manual_seed(99)
    progress = run.load(path)
    return run.differences(), progress, float(torch.rand(()))
