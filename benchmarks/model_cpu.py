"""The model on a CPU: training throughput beside transformers, and memory against length.

    python -m benchmarks.model_cpu --json benchmarks/results/model_cpu.json

Throughput: one configuration of 11 M parameters with every layer type, identical in both, forward and backward of the
next-token loss, batch 8 x 512 tokens, float32, two threads; models take turns and each figure is a median. Memory: peak
resident growth of one forward and backward of `v4-tiny` on a single document, each length in its own process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch

from benchmarks.environment import environment
from undertow.config.model import ModelConfig
from undertow.model.build import build_model
from undertow.ops.segments import Segments

BATCH, LENGTH, THREADS = 8, 512, 2
LENGTHS = (1024, 4096, 16384)

SHAPE = dict(
    vocab_size=2048, hidden_size=256, num_hidden_layers=5, num_attention_heads=8, head_dim=64, qk_rope_head_dim=16,
    q_lora_rank=128, o_groups=2, o_lora_rank=64, sliding_window=128, index_n_heads=16, index_head_dim=32, index_topk=64,
    n_routed_experts=16, num_experts_per_tok=4, moe_intermediate_size=128, num_hash_layers=1,
    compress_ratios=[0, 4, 128, 4, 128], num_nextn_predict_layers=0,
)  # fmt: skip


def transformers_model() -> torch.nn.Module:
    """The same shape in transformers, its own initial weights."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yarn = dict(type="yarn", factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536)
        return DeepseekV4ForCausalLM(DeepseekV4Config(**SHAPE, rope_scaling=yarn, attn_implementation="eager"))


def step(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """Seconds of one forward and backward."""
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    out = model(ids)
    logits = getattr(out, "logits", out)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return time.perf_counter() - start


def throughput(repeats: int) -> dict[str, object]:
    """Tokens per second of both models and their ratio."""
    config = ModelConfig.model_validate(SHAPE)
    ours, theirs = build_model(config), transformers_model()
    ids = torch.randint(0, config.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    times: dict[str, list[float]] = {"undertow": [], "transformers": []}
    for turn in range(repeats + 1):
        for name, model in (("undertow", ours), ("transformers", theirs)):
            seconds = step(model, ids)
            if turn:
                times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "parameters": sum(p.numel() for p in ours.parameters()),
        "seconds": {
            name: {"median": medians[name], "minimum": min(values), "maximum": max(values)}
            for name, values in times.items()
        },
        "tokens_per_second": {name: BATCH * LENGTH / seconds for name, seconds in medians.items()},
        "ratio": medians["transformers"] / medians["undertow"],
        "repeats": repeats,
    }


def peak_growth(length: int) -> int:
    """Bytes by which this process grows at most during one forward and backward of `length` tokens."""
    model = build_model(ModelConfig.from_preset("v4-tiny"))
    ids = torch.randint(0, model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(0))
    before = _high_water()
    hidden = model.collapse(model.trunk(ids, Segments.from_lengths([length])).streams)
    model.ops.linear_cross_entropy(hidden[:-1], model.head.weight, ids[1:])[0].mean().backward()
    return _high_water() - before


def _high_water() -> int:
    """Largest resident size of this process so far, in bytes. Linux: `ru_maxrss` would start from the parent's."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def memory() -> dict[str, object]:
    """Peak bytes per token at each length, each measured in a fresh process."""
    peaks = {}
    for length in LENGTHS:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.model_cpu", "--peak", str(length)],
            capture_output=True,
            text=True,
            check=True,
        )
        peaks[str(length)] = int(done.stdout)
    return {
        "peak_bytes": peaks,
        "peak_bytes_per_token": {length: peak / int(length) for length, peak in peaks.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the result to; printed to the terminal in any case")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps of each model; default 10")
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    if arguments.peak:
        print(peak_growth(arguments.peak))
        return
    result = {"environment": environment(), "throughput": throughput(arguments.repeats), "memory": memory()}
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
