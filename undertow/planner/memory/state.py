"""Bytes of weights, gradients and optimizer state, by profile, and how data-parallel ranks share them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

from undertow.config.errors import ConfigError
from undertow.config.presets import nearest
from undertow.config.schema import RunConfig
from undertow.model.parameters import Parameters
from undertow.model.peak import State
from undertow.planner.geometry import Geometry
from undertow.planner.memory.parameters import RankParameters

Sharing = Literal["none", "optimizer", "full"]
"""What data-parallel ranks share out: nothing, the optimizer state, or weights, gradients and state."""


class Profile(Protocol):
    """Bytes kept for parameters, before ranks share them."""

    def weights(self, p: Parameters) -> int:
        """Bytes of the parameters themselves."""
        ...

    def gradients(self, p: Parameters) -> int:
        """Bytes of their gradient buffers."""
        ...

    def optimizer_state(self, p: Parameters) -> int:
        """Bytes of main weights and moments."""
        ...


@dataclass(frozen=True)
class FlatProfile:
    """Bytes a parameter, the same for every tensor, as other programs keep them."""

    weight: int
    gradient: int
    optimizer: int

    def weights(self, p: Parameters) -> int:
        """Bytes of the parameters themselves."""
        return self.weight * p.total

    def gradients(self, p: Parameters) -> int:
        """Bytes of their gradient buffers."""
        return self.gradient * p.total

    def optimizer_state(self, p: Parameters) -> int:
        """Bytes of main weights and moments."""
        return self.optimizer * p.total


@dataclass(frozen=True)
class StateProfile:
    """A named profile; `sharing` is how data-parallel ranks share it where nothing else is said. With `host` the
    optimizer state lives in the memory of the host and passes through the GPU in chunks."""

    name: str
    profile: Profile
    sharing: Sharing
    host: bool = False


PUBLISHED: tuple[str, ...] = ("published-fp32", "published-bf16", "published-bf16-main", "published-muon")
"""Profiles of the published MI355X pretraining (its projection, its recipe) and of its variants."""

OWN: tuple[str, ...] = ("muon-fp32", "muon-bf16", "adamw-fp32", "adamw-bf16")
"""Profiles of Undertow's training loop: optimizer and `train.state_profile`, beside bfloat16 weights."""


def state_profile(name: str) -> StateProfile:
    """A profile by name (`PUBLISHED` or `OWN`). Raises `ConfigError` with the nearest name.

    published-fp32: bf16 weights, fp32 gradients, fp32 main weights and two moments. published-bf16: bf16 gradients, the
    16 bits that a bf16 weight lacks, two bf16 moments. published-bf16-main: the same with a full fp32 main copy.
    published-muon: fp32 gradients, fp32 main weights, one moment, its state on every rank.
    """
    flat = dict(zip(PUBLISHED, ((2, 4, 12), (2, 2, 6), (2, 2, 8), (2, 4, 8)), strict=True))
    if name in flat:
        return StateProfile(name, FlatProfile(*flat[name]), "none" if name == "published-muon" else "optimizer")
    if name not in OWN:
        known = [*PUBLISHED, *OWN]
        raise ConfigError(f"unknown state profile '{name}'{nearest(name, known)} (profiles: {', '.join(known)})")
    optimizer, _, width = name.partition("-")
    own = State("bfloat16", "muon" if optimizer == "muon" else "adamw", "bf16" if width == "bf16" else "fp32", True)
    return StateProfile(name, own, "full")


def profile_of_run(run: RunConfig) -> StateProfile:
    """The profile that a run trains with."""
    train = run.train
    accumulates = train.micro_batch_size is not None and train.micro_batch_size < train.batch_size
    own = State(run.numerics.dtype, train.optimizer, train.state_profile, accumulates)
    profile = StateProfile(f"{train.optimizer}-{train.state_profile}", own, "full")
    return on_host(profile) if train.offload_optimizer else profile


CHUNK, CHUNKS = 256 << 20, 2
"""Bytes in which state on the host passes through the GPU, and how many are there: one comes while another works."""


def on_host(profile: StateProfile) -> StateProfile:
    """The same profile with main weights and moments on the host."""
    if profile.host:
        return profile
    return replace(profile, name=f"{profile.name} on the host", host=True)


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one rank. The three parts that live through the step, what stays unsharded beside them, and what lies on
    the `host`; of that `optimizer` is the chunks on the GPU."""

    weights: int
    gradients: int
    optimizer: int
    unsharded_weights: int
    unsharded_gradients: int
    host: int = 0


def _shared(size: int, ranks: int) -> int:
    return -(-size // ranks)


def state_bytes(
    parameters: RankParameters,
    largest_layer: RankParameters,
    geometry: Geometry,
    profile: StateProfile,
    *,
    sharing: Sharing | None = None,
    deferred: bool = False,
) -> StateBytes:
    """State of one rank that holds `parameters`.

    Dense state is shared among `geometry.dense_copies` ranks, that of experts among `geometry.expert_data`; under full
    sharing among `geometry.dense_parts` and `geometry.expert_parts`. Then a layer's weights are whole while it works,
    two layers at once for the next one is fetched ahead, and one layer's gradients until they are summed. `deferred`:
    gradients are summed after the last of several microbatches alone, so that all weights and gradients stay whole on
    every rank, however many data-parallel ranks there are.
    """
    sharing, kept = sharing or profile.sharing, profile.profile
    full = sharing == "full"
    copies = (geometry.dense_copies, geometry.expert_data)
    if full:
        copies = (geometry.dense_parts, geometry.expert_parts)

    def held(of, shared: bool) -> int:
        return sum(_shared(of(part), ranks if shared else 1) for part, ranks in zip(parameters, copies, strict=True))

    def whole(of, each: RankParameters, layers: int) -> int:
        """Bytes beyond the rank's own share of parameters that are whole at once."""
        return sum(
            min(layers * of(part), of(everything)) - _shared(min(layers * of(part), of(everything)), ranks)
            for part, everything, ranks in zip(each, parameters, copies, strict=True)
        )

    optimizer = held(kept.optimizer_state, sharing != "none")
    at_work = parameters if deferred else largest_layer
    return StateBytes(
        held(kept.weights, full),
        held(kept.gradients, full),
        min(optimizer, CHUNKS * CHUNK) if profile.host else optimizer,
        whole(kept.weights, at_work, 1 if deferred else 2) if full else 0,
        whole(kept.gradients, at_work, 1) if full else 0,
        optimizer if profile.host else 0,
    )
