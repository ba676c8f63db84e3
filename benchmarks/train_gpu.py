"""Training the small model on one GPU: throughput, learning, memory against its closed form, and resuming.

    python -m benchmarks.train_gpu --json benchmarks/results/train_gpu.json

Three runs of one recipe through `undertow.train.pretrain`. A probe of a few steps gives the step's time, from which the
number of steps follows that fits `--seconds`, and the peak of memory. The whole run gives throughput and losses. The
third run is interrupted as by Ctrl-C midway, resumed from the checkpoint it writes, and compared with the whole run
step by step. Overrides (`train.batch_size=8`) follow the options. Without a GPU, figures of its memory are null.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import environment
from tests.model.saved import packed, saved_by_hooks
from undertow.config.gpus import find_gpu
from undertow.config.resolve import Resolved, resolve
from undertow.config.schema import RunConfig
from undertow.model.activations import Objective, even_documents, saved_terms
from undertow.model.flops import flops_per_token
from undertow.model.modules import again_of
from undertow.model.parameters import all_parameters
from undertow.model.peak import Peak, State, peak_bytes
from undertow.train.metrics import read_metrics
from undertow.train.objective import Weights, objective
from undertow.train.pretrain import Outcome, pretrain
from undertow.train.progress import Lines

PROBE_STEPS = 6
SETTLING = 5
"""Steps at a run's beginning that its throughput leaves out."""


class Watch(Lines):
    """Lines, and an interrupt of this process after a step."""

    def __init__(self, every: int, interrupt_after: int | None = None) -> None:
        super().__init__(every)
        self._interrupt_after = interrupt_after

    def step(self, metrics: dict[str, Any], seconds_left: float) -> None:
        super().step(metrics, seconds_left)
        if metrics["step"] == self._interrupt_after:
            os.kill(os.getpid(), signal.SIGINT)


def recipe_of(name: str, overrides: Iterable[str], out: Path, steps: int) -> Resolved:
    """The recipe at a length of its own: warm-up over a tenth, four evaluations, one checkpoint at the end."""
    own = (
        *(f"train.steps={steps}", f"train.warmup_steps={max(steps // 10, 1)}", f"train.eval_every={-(-steps // 4)}"),
        *(f"train.checkpoint_every={steps}", f"train.log_every={max(steps // 10, 1)}"),
        *("train.eval_sequences=32", "tracking=[]"),
    )
    return resolve(name, [*own, *overrides, f'out="{out}"'], dict(os.environ))


def metrics_of(out: Path) -> list[dict[str, Any]]:
    """All steps of a run."""
    return list(read_metrics(out / "metrics.jsonl"))


def throughput(entries: list[dict[str, Any]], config: RunConfig) -> dict[str, Any]:
    """Tokens per second of a step, and the work that this is in both conventions."""
    rates = sorted(entry["train/tokens_per_second"] for entry in entries[min(SETTLING, len(entries) // 2) :])
    median = statistics.median(rates)
    both = flops_per_token(
        config.model,
        config.train.sequence_length,
        frozen_indexer=config.indexer.frozen,
        mtp=config.train.mtp_weight > 0,
    )
    gpu = find_gpu(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    tflops = {
        convention: work * median / 1e12 for convention, work in zip(("algorithmic", "reported"), both, strict=True)
    }
    return {
        "steps": len(rates),
        "tokens_per_second": {
            "median": median,
            "tenth": rates[len(rates) // 10],
            "ninetieth": rates[-1 - len(rates) // 10],
            "least": rates[0],
            "most": rates[-1],
        },
        "seconds_per_step": config.train.batch_size * config.train.sequence_length / median,
        "tflops": tflops,
        "share_of_bf16_peak": None
        if gpu is None
        else {name: value * 1e12 / gpu.bf16 for name, value in tflops.items()},
    }


def learning(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Next-token loss over the first and last ten steps, and held out, in nats per token."""
    losses = [entry["train/lm_loss"] for entry in entries]
    return {
        "first_step": losses[0],
        "mean_of_first_ten": statistics.mean(losses[:10]),
        "mean_of_last_ten": statistics.mean(losses[-10:]),
        "held_out": {str(entry["step"]): entry["eval/loss"] for entry in entries if "eval/loss" in entry},
        "skipped": entries[-1].get("train/skipped"),
    }


def _objective_of(config: RunConfig, rows: int) -> Objective:
    train = config.train
    return Objective(
        mtp=train.mtp_weight > 0,
        distil=not config.indexer.frozen,
        balance_rows=rows if train.balance_weight else 0,
        recompute=again_of(config.recompute, config.model.num_hidden_layers),
    )


def closed_forms(config: RunConfig) -> tuple[int, Peak]:
    """Saved bytes of one pass and the peak of a step, every row taken as one document."""
    train = config.train
    rows = min(train.micro_batch_size or train.batch_size, train.batch_size)
    documents = even_documents(rows * train.sequence_length, train.sequence_length)
    wanted, dtype = _objective_of(config, rows), config.numerics.dtype
    state = State(dtype, train.optimizer, train.state_profile, accumulates=rows < train.batch_size)
    saved = sum(term.bytes for term in saved_terms(config.model, documents, dtype, wanted))
    return saved, peak_bytes(config.model, documents, state, wanted, gpu=torch.cuda.is_available())


def memory(outcome: Outcome, config: RunConfig, allocated: int | None) -> dict[str, Any]:
    """Closed forms against what the GPU held and what autograd saves there."""
    train = config.train
    rows = min(train.micro_batch_size or train.batch_size, train.batch_size)
    weights = Weights(
        train.mtp_weight,
        train.balance_weight,
        train.z_loss_weight,
        0.0 if config.indexer.frozen else config.indexer.weight,
    )
    for parameter in outcome.model.parameters():
        parameter.grad = None
    batch = packed(config.model, [[train.sequence_length]] * rows, outcome.model.embed.weight.device)
    recompute = _objective_of(config, rows).recompute
    found = saved_by_hooks(
        outcome.model, lambda: objective(outcome.model, batch, weights, recompute=recompute).total.detach()
    )
    saved, peak = closed_forms(config)
    return {
        "saved_bytes": {"hooks": found, "closed_form": saved, "ratio": saved / found},
        "peak_bytes": {
            "max_memory_allocated": allocated,
            "closed_form": peak.total,
            "ratio": None if allocated is None else peak.total / allocated,
            "moment": peak.moment,
            "parts": {part.name: {"bytes": part.bytes, "basis": part.basis} for part in peak.parts},
        },
    }


def difference(whole: list[dict[str, Any]], other: list[dict[str, Any]], stopped: int) -> dict[str, Any]:
    """How far the losses of two runs lie apart, before and after the step at which the second was stopped."""
    apart = {a["step"]: abs(a["train/lm_loss"] - b["train/lm_loss"]) for a, b in zip(whole, other, strict=True)}
    before, after = (
        [value for step, value in apart.items() if (step > stopped) is resumed] for resumed in (False, True)
    )
    held_out = [abs(a["eval/loss"] - b["eval/loss"]) for a, b in zip(whole, other, strict=True) if "eval/loss" in a]
    return {
        "stopped_after_step": stopped,
        "steps_after": len(after),
        "same_steps": all(b["step"] == a["step"] + 1 for a, b in pairwise(other)),
        "largest_difference_before": max(before),
        "difference_of_first_step_after": apart[stopped + 1],
        "largest_difference_after": max(after),
        "largest_difference_held_out": max(held_out),
        "equal": max(apart.values()) == 0.0,
    }


def interrupted(name: str, overrides: list[str], out: Path, steps: int, after: int) -> None:
    """A run that Ctrl-C stops and that is then resumed."""
    resolved = recipe_of(name, overrides, out, steps)
    try:
        pretrain(resolved, Watch(resolved.config.train.log_every, after))
    except KeyboardInterrupt:
        pass
    else:
        raise RuntimeError(f"the run went on to its end; it should have stopped after step {after}")
    pretrain(recipe_of(name, overrides, out, steps), Watch(resolved.config.train.log_every), resume=True)


def measure(name: str, overrides: list[str], runs: Path, seconds: float, steps: int | None) -> dict[str, Any]:
    """All three runs, in directories of their own under `runs`."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    probe = recipe_of(name, overrides, runs / "probe", PROBE_STEPS)
    outcome = pretrain(probe, Watch(1))
    allocated = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    used = memory(outcome, probe.config, allocated)
    del outcome
    rate = statistics.median(entry["train/tokens_per_second"] for entry in metrics_of(runs / "probe")[2:])
    train = probe.config.train
    each = train.batch_size * train.sequence_length / rate
    steps = steps or max(20, int(seconds / (2.4 * each)))  # two runs, and a fifth for evaluation and checkpoints
    whole = recipe_of(name, overrides, runs / "whole", steps)
    pretrain(whole, Watch(whole.config.train.log_every))
    stop = steps // 2
    interrupted(name, overrides, runs / "stopped", steps, stop)
    entries = metrics_of(runs / "whole")
    return {
        "recipe": name,
        "overrides": overrides,
        "steps": steps,
        "tokens_per_step": train.batch_size * train.sequence_length,
        "parameters": sum(all_parameters(probe.config.model)[:2]),
        "throughput": throughput(entries, whole.config),
        "loss": learning(entries),
        "memory": used,
        "resume": difference(entries, metrics_of(runs / "stopped"), stop),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the result to; printed to the terminal in any case")
    parser.add_argument("--recipe", default="pretrain/small", help="recipe to train; default pretrain/small")
    parser.add_argument("--seconds", type=float, default=180.0, help="time for the two long runs; default 180")
    parser.add_argument("--steps", type=int, help="steps of the two long runs, instead of what fits --seconds")
    parser.add_argument("--runs", type=Path, help="keep the run directories here; default a temporary directory")
    parser.add_argument("overrides", nargs="*", help="key=value of the configuration")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runs = arguments.runs or Path(scratch)
        result = measure(arguments.recipe, arguments.overrides, runs, arguments.seconds, arguments.steps)
    result = {"environment": environment(), **result}
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
