"""Families of operators within whole training steps: all off, all on, each operator on alone, and torch.compile.

One model and one optimizer serve all settings; only the operators are exchanged. The learning rate and the rate of the
router biases are 0, so that the weights stay, and each setting reads the same tokens: losses and gradient norms differ
by the rounding of operators alone.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from undertow.bench.ceilings import Ceilings, ceilings
from undertow.bench.compiled import Compilation, compiled, exchange
from undertow.bench.environment import environment
from undertow.bench.settings import build, default_preset, device_for, random_text, resolve_step
from undertow.bench.step import Column, Follow, allocated, figures, timed_step
from undertow.config.errors import InputError
from undertow.config.optimizations import FAMILIES
from undertow.config.presets import nearest
from undertow.config.resolve import Resolved
from undertow.data.packing import Packer
from undertow.ops import OPS, Choice, Ops
from undertow.ops.registry import recipe_key, summary
from undertow.train.loop import Trainer
from undertow.train.start import choices_of

Role = Literal["off", "on", "alone", "compile"]


@dataclass(frozen=True)
class Setting:
    """A row of the ladder: its name, what it is, the keys that it is made with, and the operator that is on alone."""

    name: str
    role: Role
    resolved: Resolved
    op: str = ""


@dataclass(frozen=True)
class Switches:
    """Keys of the recipe by operator, and their values in the two positions of the families."""

    names: tuple[str, ...]
    keys: dict[str, str]
    on: Mapping[str, str]
    off: Mapping[str, str]

    def words(self, alone: str = "", *, on: bool = False) -> list[str]:
        """KEY=VALUE of every operator: on or off, and `alone` on in any case."""
        return [f"{key}={(self.on if on or op == alone else self.off)[key]}" for op, key in self.keys.items()]


def switches(families: str, words: Sequence[str]) -> Switches:
    """Those of `families`, names with commas between. Raises `InputError` for one that is unknown or sets no operator,
    and for KEY=VALUE `words` that set what the families do."""
    names = tuple(dict.fromkeys(name.strip() for name in families.split(",") if name.strip()))
    every = {recipe_key(op): op for op in OPS}
    known = [name for name, family in FAMILIES.items() if family.on and family.on.keys() <= every.keys()]
    for name in names or (families,):
        if name not in known:
            hint = nearest(name, known)
            raise InputError(f"--families {name}: no family of operators{hint} (families: {', '.join(known)})")
    on = {key: value for name in names for key, value in FAMILIES[name].on.items()}
    off = {key: value for name in names for key, value in FAMILIES[name].off.items()}
    for word in words:
        key = word.partition("=")[0].strip()
        if key in on or key.removeprefix("optimizations.") in names:
            raise InputError(f"{word}: --families {','.join(names)} sets this key; leave out either")
    return Switches(names, {every[key]: key for key in on}, on, off)


class Bench:
    """One model and optimizer, whose operators are exchanged from setting to setting."""

    def __init__(self, resolved: Resolved, steps: int, device: torch.device) -> None:
        """Build them as `resolved` says; `unfit` warns where a step may not fit."""
        self.device, self._steps = device, steps
        self._before = allocated(device)
        self._trainer, self.unfit = build(resolved, steps + 1)

    def take(self, setting: Setting, seconds: float) -> dict[str, Any]:
        """A row of the result file: `steps` timed steps after a short one that is not. `seconds` of compiling at most,
        where the setting compiles. What fails is told in the row."""
        model, ops = self._trainer.model, _table(setting.resolved, self.device)
        exchange(model, ops)
        made: Compilation | None = None
        row: dict[str, Any] = {"name": setting.name, "role": setting.role, "op": setting.op or None}
        try:
            with compiled(model, ops, seconds) if setting.role == "compile" else nullcontext() as made:
                settled = self._settle(setting.resolved)
                early = made.graphs if made else 0
                column = self._column(setting, ops)
                for _ in range(self._steps):
                    timed_step(column, self.device)
                if made:
                    made.late = made.graphs - early
            row |= {"status": "ok", **figures(column, self.device)}
        except Exception as fault:  # a kernel's, a compiler's, too little memory: the other settings are wanted too
            settled = None
            row |= {"status": "failed", "reason": " ".join(f"{type(fault).__name__}: {fault}".split())[:400]}
        if made is not None:
            row["compile"] = {"limit_seconds": seconds, "first_step_seconds": settled, **made.json()}
        self._trainer.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return row

    def _column(self, setting: Setting, ops: Ops) -> Column:
        resolved = setting.resolved
        trainer = self._begun(resolved, resolved.config.train.batch_size)
        operators, held = summary(ops.choices.values()), allocated(self.device) - self._before
        return Column(setting.name, resolved, trainer, settling=0, held=held, operators=operators, calls=ops.calls)

    def _settle(self, resolved: Resolved) -> float:
        """Seconds of a step of one micro-batch: kernels are compiled, memory and state are allocated."""
        begun, train = time.perf_counter(), resolved.config.train
        self._begun(resolved, min(train.micro_batch_size or train.batch_size, train.batch_size)).step()
        return time.perf_counter() - begun

    def _begun(self, resolved: Resolved, rows: int) -> Trainer:
        config = resolved.config
        text = random_text(config, self._steps + 1)
        packer = Packer(text.training_ids, rows, config.train.sequence_length, config.seed)
        still = {"batch_size": rows, "learning_rate": 0.0, "min_learning_rate": 0.0, "bias_update_rate": 0.0}
        return self._trainer.anew(packer, self._trainer.settings.model_copy(update=still))


def _table(resolved: Resolved, device: torch.device) -> Ops:
    config = resolved.config
    return Ops(choices_of(config), batch_invariant=config.numerics.batch_invariant, device=device)


def bench_families(
    preset: str | None,
    words: Sequence[str],
    families: str,
    alone: int | None,
    seconds: float | None,
    steps: int,
    variables: Mapping[str, str],
    follow: Follow = lambda done, of, what: None,
    keep: Callable[[dict[str, Any]], None] = lambda part: None,
) -> dict[str, Any]:
    """Measure `steps` steps of `preset` (None: one that suits the device) with KEY=VALUE `words`, with the operators of
    `families` off, on, and each on alone; with `seconds` also with all off under torch.compile.

    Those of one operator have `alone` sequences a step (None: as many as the others; 0: they are left out). Returns
    the content of the result file; `keep` is called with that of the settings so far after each.
    """
    switched, device = switches(families, words), device_for(words, variables)
    gpu, preset = device.type == "cuda", preset or default_preset(device)

    def resolved(own: Sequence[str]) -> Resolved:
        return resolve_step(preset, [*words, *own], steps + 1, gpu, variables)

    on = resolved(switched.words(on=True))
    planned = list(_planned(switched, resolved, on, alone))
    if seconds is not None:  # the last, as it is the one that may take longest
        planned.append(Setting("all off, torch.compile", "compile", planned[0].resolved))
    choices = _table(on, device).choices
    follow(0, len(planned), f"building {preset}")
    with torch.cuda.stream(torch.cuda.Stream(device)) if gpu else nullcontext():  # graphs are not made on the usual one
        reached = ceilings(device)
    bench = Bench(on, steps, device)
    result = _document(preset, switched, choices, device, reached)
    if bench.unfit:
        follow(0, len(planned), bench.unfit)
    for number, setting in enumerate(planned):
        follow(number, len(planned), setting.name)
        reason = _idle(choices[setting.op], result) if setting.role == "alone" else None
        if reason is None:
            row = bench.take(setting, seconds or 0.0)
        else:
            row = {"name": setting.name, "role": "alone", "op": setting.op, "status": "absent", "reason": reason}
        result["settings"].append(_rated(row, result["settings"], reached))
        keep(result)
    follow(len(planned), len(planned), "done")
    return result


def _planned(
    switched: Switches, resolved: Callable[[Sequence[str]], Resolved], on: Resolved, alone: int | None
) -> Iterator[Setting]:
    """The settings in their order, that under torch.compile apart. Where those of one operator have a step of another
    size, so has one more with all off, for them to be compared with."""
    off = resolved(switched.words())
    yield Setting("all off", "off", off)
    yield Setting("all on", "on", on)
    if alone == 0:
        return
    size = [] if alone is None else [f"train.batch_size={alone}"]
    if alone not in (None, on.config.train.batch_size):
        yield Setting("all off", "off", resolved([*switched.words(), *size]))
    for op in switched.keys:
        yield Setting(op, "alone", resolved([*switched.words(op), *size]), op)


def _idle(choice: Choice, result: dict[str, Any]) -> str | None:
    """Why there is nothing to measure of an operator that is on alone, None if there is."""
    if choice.chosen == "reference":
        return "; ".join(choice.refused.values())
    whole = next(row for row in result["settings"] if row["role"] == "on")
    if whole["status"] != "ok":
        return None
    taken = whole["calls"].get(choice.op)
    if not taken:
        return "a training step does not call it"
    return None if taken.keys() - {"reference"} else "its kernel takes no call of this step"


def _rated(row: dict[str, Any], others: Sequence[dict[str, Any]], reached: Ceilings) -> dict[str, Any]:
    """With the shares of the rate of a matrix product, and beside the setting of the same size that has all off."""
    if row["status"] != "ok":
        return row
    share = {name: 1e12 * rate / reached.matmul for name, rate in row["tflops"].items()}
    off = next((r for r in others if r["role"] == "off" and r["status"] == "ok" and r["tokens"] == row["tokens"]), None)
    times = None if off is None else row["tokens_per_second"] / off["tokens_per_second"]
    return row | {"share_of_matmul": share, "times_off": 1.0 if row["role"] == "off" else times}


def _document(
    preset: str, switched: Switches, choices: Mapping[str, Choice], device: torch.device, reached: Ceilings
) -> dict[str, Any]:
    return {
        "kind": "step families",
        "environment": environment(),
        "device": str(device),
        "preset": preset,
        "families": list(switched.names),
        "kernels": [op for op in switched.keys if choices[op].chosen != "reference"],
        "ceilings": reached.json(),
        "units": {
            "ms": "milliseconds a step",
            "losses": "nats per token",
            "gradient_norms": "before clipping, the indexers' gradients apart",
            "tflops": "10^12 operations a second",
            "calls": "of operators that a kernel was chosen for, by the backend that took them, in all steps",
            "times_off": "tokens a second over those of the same tokens a step with all off",
        },
        "settings": [],
    }
