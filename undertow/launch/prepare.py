"""From a recipe and machines to a launch: every value settled, the plan of it, and what speaks against it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from undertow.config.conflicts import conflicts, warnings
from undertow.config.dump import values_of
from undertow.config.errors import ConfigError
from undertow.config.optimizations import unbuilt
from undertow.config.published import Nearest, asks_by_name, families_on, nearest_rung
from undertow.config.resolve import Resolved, resolve
from undertow.config.scalars import typed
from undertow.launch.command import command_of, slurm_script
from undertow.launch.machines import USUAL, Machines, machines_of, stated_pool
from undertow.planner.plan import Plan, plan
from undertow.train.widths import refuse_wider

_WIDTHS = ("tensor", "pipeline", "expert", "context")
_BY_HAND = ("command line", "environment")
_VARIABLE = "environment UNDERTOW__"


@dataclass(frozen=True)
class Launch:
    """A run on machines. `resolved` has every value, those that were planned too; `words` are all `KEY=VALUE` that lead
    from the recipe to it on another machine; `replanned` are the GPUs that the recipe is for, where its layout was
    replaced by one for these."""

    recipe: str
    machines: Machines
    resolved: Resolved
    words: tuple[str, ...]
    plan: Plan
    replanned: str | None

    @cached_property
    def conflicts(self) -> tuple[str, ...]:
        """What cannot go together, and of a run that fits what its processes would refuse, a sentence each."""
        found = conflicts(self.resolved.config, self.machines.gpus_per_node)
        if self.plan.refusal:
            return found
        try:
            refuse_wider(self.resolved.config, self.machines.gpus)
        except ConfigError as error:
            return (*found, str(error))
        return found

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What may not be meant, a sentence each."""
        found = list(warnings(self.resolved.config))
        if self.machines.nodes > 1 and self.machines.gpus_per_node != USUAL:
            found.append(
                f"--gpus-per-node {self.machines.gpus_per_node}: what GPUs send each other is priced for machines of "
                f"{USUAL}, not for these"
            )
        if "mega_moe" in self.unbuilt:
            found.append(
                "optimizations.mega_moe is on: it is not built yet, and memory is that of separate expert products; "
                "undertow plan --implementation primus counts the published kernel's"
            )
        return tuple(found)

    @property
    def unbuilt(self) -> dict[str, str]:
        """Families that are on and cannot run in this version, each with its conditions."""
        return unbuilt(self.resolved.config.optimizations)

    @cached_property
    def rung(self) -> Nearest:
        """The nearest rung of the published ladder."""
        config = self.resolved.config
        tuned = self.plan.stages != self.plan.task.even_layout()
        return nearest_rung(families_on(config, tuned_layout=tuned), named_backend=asks_by_name(config))

    @property
    def command(self) -> str:
        """What starts it, on every machine."""
        return command_of(self.recipe, self.words, self.machines)

    @property
    def script(self) -> str:
        """The same for `sbatch`."""
        return slurm_script(self.recipe, self.words, self.machines)


def prepare(
    recipe: str,
    nodes: int,
    gpus_per_node: int | None,
    gpu: str | None,
    overrides: Sequence[str],
    environment: Mapping[str, str],
) -> Launch:
    """Plan a recipe on machines.

    On other GPUs than `parallel.gpus` names, its widths stay and layout and recomputation are tuned anew, unless the
    layout is given by hand. Raises `ConfigError` where widths and batch do not suit the GPUs, and `DoesNotFit` where
    no layout fits.
    """
    resolved = resolve(recipe, overrides, environment)
    machines = machines_of(resolved.config, nodes, gpus_per_node, gpu)
    pool = stated_pool(resolved.config)
    other = pool is not None and str(pool) != str(machines)
    by_hand = any(place in resolved.sources["parallel.layout"] for place in _BY_HAND)
    parallel = resolved.config.parallel
    replanned = other and not by_hand and parallel.pipeline > 1
    words = [*_variables(resolved), *overrides]
    search: dict[str, Any] = {"overrides": words}
    if replanned:
        kept = {"tensor": parallel.tensor, "context": parallel.context}
        search = {"tune": True, "overrides": [*words, "parallel.layout=null"], **kept}
    try:
        found = plan(recipe, str(machines), environment=environment, **search)
    except ConfigError as error:
        if not other:
            raise
        raise ConfigError(
            f"--nodes {nodes}: {error}; the recipe is planned for {pool}, give parallel.pipeline, parallel.expert or "
            f"train.batch_size that suit {machines}"
        ) from None
    chosen = _chosen(found, resolved, machines)
    words += chosen.values()
    settled = resolve(recipe, words, environment)
    before = {key: source for key, source in resolved.sources.items() if key in settled.sources}
    sources = settled.sources | before | dict.fromkeys(chosen, f"planned for {machines}")
    return Launch(
        recipe, machines, replace(settled, sources=sources), tuple(words), found, str(pool) if replanned else None
    )


def _variables(resolved: Resolved) -> list[str]:
    """Values of variables as words, for other machines may not have them."""
    values = values_of(resolved)
    named = [key for key, source in resolved.sources.items() if source.startswith(_VARIABLE)]
    return [_word(key, values[key]) for key in named]


def _chosen(found: Plan, resolved: Resolved, machines: Machines) -> dict[str, str]:
    """Words for what was planned and is not so in the recipe, by key."""
    parallel, recompute, geometry = resolved.config.parallel, resolved.config.recompute, found.task.geometry
    planned: dict[str, Any] = {name: getattr(geometry, name) for name in _WIDTHS}
    planned["schedule"] = found.task.schedule
    if geometry.pipeline > 1 and (parallel.layout is None or found.tuned):
        planned["layout"] = found.layout
    if machines.gpus > 1 or parallel.gpus is not None:
        planned["gpus"] = str(machines)
    keys = {f"parallel.{name}": value for name, value in planned.items() if value != getattr(parallel, name)}
    if found.tuned:
        layers = sorted(found.recompute.layers)
        every = range(resolved.config.model.num_hidden_layers)
        now = list(every) if recompute.layers == "all" else [] if recompute.layers == "none" else recompute.layers
        if layers != sorted(now):
            keys["recompute.layers"] = layers or "none"
    return {key: _word(key, value) for key, value in keys.items()}


def _word(key: str, value: Any) -> str:
    """`KEY=VALUE` that is read as this value: text stands bare where that is read as text."""
    bare = isinstance(value, str) and typed(value, key) == value
    return f"{key}={value if bare else json.dumps(value, ensure_ascii=False, separators=(',', ':'))}"
