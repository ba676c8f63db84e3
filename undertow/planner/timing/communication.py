"""Seconds that a run spends sending beyond what its rates contain.

Fitted rates absorb what the measured runs sent, in their own geometry. So each kind of traffic is priced twice, in the
geometry of the plan and in that of the calibration, for the same bytes, and only the excess counts. Rates and latencies
are the priors of `fabric`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from undertow.planner.calibration.measured import Measurements
from undertow.planner.geometry import Geometry
from undertow.planner.memory.model import MemoryModel
from undertow.planner.memory.parameters import RankParameters
from undertow.planner.pipeline.timeline import StageTime
from undertow.planner.timing.fabric import Fabric, Group

HIDDEN_DISPATCH = 0.65
"""Share of the experts' all-to-all behind other work: a prior, that of the framework of the measured runs."""

_BF16 = 2


def expert_group(geometry: Geometry) -> Group:
    """Ranks that hold all experts between them."""
    return Group(geometry.expert)


def copies(geometry: Geometry) -> tuple[Group, Group]:
    """Ranks that hold the same dense weights, and those that hold the same experts."""
    return Group(geometry.dense_copies, geometry.tensor), Group(geometry.expert_data, geometry.expert)


@dataclass(frozen=True)
class Communication:
    """What the ranks of a run send, beyond what the `measured` runs behind its rates did."""

    memory: MemoryModel
    fabric: Fabric
    measured: Measurements
    frozen_indexer: bool = False

    def block(self, layer: int, time: StageTime) -> StageTime:
        """A layer or MTP block that computes for `time`, with all that it sends."""
        forward, backward = self._passes(layer)
        if layer >= self.memory.m.config.num_hidden_layers:  # an MTP block has a head of its own
            forward, backward = forward + self._beyond(self._tensor), backward + self._beyond(self._tensor)
        return self._with_weights(
            self.memory.layers[layer],
            time._replace(forward=time.forward + forward, backward=time.backward + backward),
        )

    def embedding(self, time: StageTime) -> StageTime:
        """The embedding, which takes `time`: with no work to hide behind it is gathered once an iteration, however
        weights are shared."""
        return self._with_weights(self.memory.embedding, time, once=True)

    def head(self, time: StageTime) -> StageTime:
        """The output head, which computes for `time`."""
        once = self._beyond(self._tensor)
        time = time._replace(forward=time.forward + once, backward=time.backward + once)
        return self._with_weights(self.memory.head, time)

    def _beyond(self, seconds: Callable[[Geometry], float]) -> float:
        return max(0.0, seconds(self.memory.m.geometry) - seconds(self.measured.geometry))

    def _passes(self, layer: int) -> tuple[float, float]:
        """Seconds that the activations of a layer are under way, forward and backward."""
        tensor = self._beyond(self._tensor)
        ahead, back = self._context_bytes(layer)
        context = [self._beyond(lambda g, size=size: self._context(g, size)) for size in (ahead, back)]
        # Attention and shared expert gather their input and scatter their output; backward mirrors that, and gathers
        # both inputs once more for the weight gradients.
        return self.experts + 4 * tensor + context[0], self.experts + 6 * tensor + context[1]

    @cached_property
    def experts(self) -> float:
        """Seconds in which the tokens of a layer go to their experts and back, as far as nothing hides that."""
        return 2 * (1 - HIDDEN_DISPATCH) * self._beyond(self._dispatch)

    def _dispatch(self, geometry: Geometry) -> float:
        """Each token to its experts, or back."""
        m = self.memory.m
        size = m.own * m.config.num_experts_per_tok * m.config.hidden_size * _BF16
        return self.fabric.exchange_seconds(size, expert_group(geometry))

    def _tensor(self, geometry: Geometry) -> float:
        """One stream of a sequence, gathered from the ranks that share it or summed to them."""
        m = self.memory.m
        return self.fabric.gather_seconds(m.rows * m.config.hidden_size * _BF16, Group(geometry.tensor))

    def _context_bytes(self, layer: int) -> tuple[int, int]:
        """Compressed entries and indexer keys of whole sequences: bytes gathered forward, and summed backward."""
        m = self.memory.m
        config, batch, kind = m.config, m.batch, m.config.kind(layer)
        if kind == "swa":
            return 0, 0
        entries = batch.micro_batch * (batch.sequence_length // config.compress_ratios[layer])
        keys = entries * config.index_head_dim * _BF16 if kind == "csa" else 0
        values = entries * config.head_dim * _BF16
        return values + keys, values + (0 if self.frozen_indexer else keys)

    def _context(self, geometry: Geometry, size: int) -> float:
        m, group = self.memory.m, Group(geometry.context, geometry.tensor)
        halo = m.batch.micro_batch * (m.config.sliding_window - 1) * m.config.head_dim * _BF16
        return self.fabric.send_seconds(halo, group) + self.fabric.gather_seconds(size, group)

    def _with_weights(self, parameters: RankParameters, time: StageTime, *, once: bool = False) -> StageTime:
        """Sums of gradients and gathers of weights.

        Once an iteration, unless weights are shared out in full: then a layer's are gathered for its forward, again for
        its backward, and its gradients summed, all behind its own computation as far as that lasts.
        """
        profile = self.memory.profile.profile
        weights = [profile.weights(part) for part in parameters]
        gradients = [profile.gradients(part) for part in parameters]
        sharing = self.memory.sharing or self.memory.profile.sharing
        if sharing == "full" and not (self.memory.deferred or once):
            # Runs that shared less sent nothing of the kind for each microbatch.
            same = self.measured.profile.sharing == "full"
            gather, reduce = self._collective(weights, same), self._collective(gradients, same)
            return time._replace(forward=max(time.forward, gather), backward=max(time.backward, gather + reduce))
        back = gradients if sharing == "none" else weights  # an all-reduce gathers what it has summed
        same = self.measured.profile.sharing != "full"
        return time._replace(step=time.step + self._collective(gradients, same) + self._collective(back, same))

    def _collective(self, sizes: Sequence[int], same: bool) -> float:
        """Seconds to gather or to reduce and scatter dense weights and experts, each over their copies; `same`: the
        measured runs sent the same at the same times."""
        total = 0.0
        here, there = copies(self.memory.m.geometry), copies(self.measured.geometry)
        for size, group, measured in zip(sizes, here, there, strict=True):
            contained = self.fabric.gather_seconds(size, measured) if same else 0.0
            total += max(0.0, self.fabric.gather_seconds(size, group) - contained)
        return total
