"""Conversion at size: memory, rate against a plain copy, and going on after kills, on a model of a few gigabytes.

    python -m benchmarks.convert_cpu DIRECTORY [--tensor-gb 3.2] [--rounds 5] [--json FILE]

DIRECTORY needs some 30 GB. The model has one layer whose stacked experts are one tensor of the given size in BF16.
Prints one JSON object, and writes it to FILE: anonymous memory at its peak in MB (sampled), seconds of each conversion
and of a plain copy of the same bytes, synced to disk alike, medians of rounds that take turns, and what each kill left
to do.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.environment import environment
from undertow.checkpoint.convert.conversion import convert
from undertow.checkpoint.convert.target import Wish
from undertow.checkpoint.header import BITS, size_of
from undertow.checkpoint.names import expected_tensors, is_routed, is_scaled, scale_name
from undertow.config.model import ModelConfig
from undertow.config.model_json import released_config

CHUNK = 1 << 24


def shape_of(gigabytes: float) -> ModelConfig:
    """A model of one layer whose `w13` has about `gigabytes` in BF16."""
    experts, hidden = 32, 4096
    inner = int(gigabytes * 1e9 / (2 * 2 * experts * hidden)) // 128 * 128
    return ModelConfig.from_preset(
        "v4-debug",
        num_hidden_layers=1, compress_ratios=[0], num_nextn_predict_layers=0, num_hash_layers=0,
        n_routed_experts=experts, hidden_size=hidden, moe_intermediate_size=inner,
    )  # fmt: skip


def write_release(directory: Path, config: ModelConfig) -> None:
    """A release of `config`, FP8 and FP4, of repeated random codes, in one file per gigabyte or so."""
    directory.mkdir()
    header, at, plan = {}, 0, []
    for name, (shape, kind) in expected_tensors(config, "released").items():
        entries = [(name, "BF16" if kind == "weight" else "F32", shape, "number")]
        if is_routed(name):
            entries = [
                (name, "I8", (shape[0], shape[1] // 2), "code"),
                (scale_name(name), "F8_E8M0", (shape[0], shape[1] // 32), "scale"),
            ]
        elif is_scaled(name):
            grid = (-(-shape[0] // 128), -(-shape[1] // 128))
            entries = [(name, "F8_E4M3", shape, "code"), (scale_name(name), "F8_E8M0", grid, "scale")]
        for entry, dtype, held, what in entries:
            plan.append((entry, dtype, held, what))
    plan.sort(key=lambda item: -BITS[item[1]])
    for entry, dtype, held, _ in plan:
        header[entry] = {"dtype": dtype, "shape": list(held), "data_offsets": [at, at + size_of(dtype, held)]}
        at += size_of(dtype, held)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 0x7E, (CHUNK,), dtype=torch.uint8, generator=generator).numpy().tobytes()
    scales = torch.randint(120, 126, (CHUNK,), dtype=torch.uint8, generator=generator).numpy().tobytes()
    numbers = torch.randn(CHUNK // 4, generator=generator)
    floats, halves = numbers.numpy().tobytes(), numbers.bfloat16().view(torch.int16).numpy().tobytes()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, dtype, held, what in plan:
            left = size_of(dtype, held)
            block = {"code": codes, "scale": scales}.get(what, floats if dtype == "F32" else halves)
            while left:
                count = min(left, len(block))
                file.write(block[:count])
                left -= count
    (directory / "config.json").write_text(json.dumps(released_config(config)))


def peak(words: list[str]) -> tuple[float, float]:
    """Seconds and the largest RssAnon in MB of a command."""
    begun, most = time.monotonic(), 0.0
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    while child.poll() is None:
        most = max(most, anonymous(child.pid))
        time.sleep(0.02)
    if child.returncode:
        raise SystemExit(f"{words}: exit code {child.returncode}")
    return time.monotonic() - begun, most


def anonymous(process: int) -> float:
    try:
        with open(f"/proc/{process}/status") as status:
            return next((int(line.split()[1]) / 1000 for line in status if line.startswith("RssAnon")), 0.0)
    except OSError:
        return 0.0


def command(source: Path, target: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "undertow", "convert", str(source), str(target), *options]


def plain_copy(source: Path, target: Path) -> float:
    begun = time.monotonic()
    shutil.copytree(source, target)
    for file in target.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    return time.monotonic() - begun


def sums(directory: Path) -> dict[str, str]:
    found = {}
    for path in sorted(directory.iterdir()):
        with open(path, "rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def killed(source: Path, target: Path, size: int, options: tuple[str, ...]) -> list[dict[str, float]]:
    """Kill when 10, 30, 50, 70 and 90 percent of `size` bytes are written; what was finished, and that it stays."""
    work = target.with_name(f".{target.name}.converting")
    moments = []
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        child = subprocess.Popen(command(source, target, *options), stdout=subprocess.DEVNULL)
        while child.poll() is None and written(work) < share * size:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.wait()
        states = {file.name: file.stat() for file in work.glob("*.safetensors")}
        moments.append({name: state.st_mtime_ns for name, state in states.items()})
    return moments


def written(work: Path) -> int:
    try:
        return sum(file.stat().st_size for file in work.iterdir())
    except OSError:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tensor-gb", type=float, default=3.2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    place: Path = given.directory
    place.mkdir(parents=True)
    try:
        told = json.dumps({**environment(), **measure(place, shape_of(given.tensor_gb), given.rounds)}, indent=2)
        print(told)
        if given.json:
            given.json.write_text(told + "\n")
    finally:
        shutil.rmtree(place)


def measure(place: Path, config: ModelConfig, rounds: int) -> dict[str, object]:
    source, stacked = place / "release", place / "stacked"
    write_release(source, config)
    result: dict[str, object] = {"release_gb": (source / "model.safetensors").stat().st_size / 1e9}
    seconds, most = peak(command(source, stacked, "--to", "undertow"))
    result["release to undertow"] = {"seconds": seconds, "peak_anonymous_mb": most}
    result["stacked_gb"] = sum(file.stat().st_size for file in stacked.glob("*.safetensors")) / 1e9
    times: dict[str, list[float]] = {"copy": [], "rename": []}
    for _ in range(rounds):
        times["copy"].append(plain_copy(stacked, place / "copy"))
        shutil.rmtree(place / "copy")
        begun = time.monotonic()
        convert(stacked, place / "renamed", Wish("transformers"))
        times["rename"].append(time.monotonic() - begun)
        shutil.rmtree(place / "renamed")
    medians = {name: statistics.median(found) for name, found in times.items()}
    options = ("--to", "released", "--shard-bytes", str(500_000_000))
    whole = place / "whole"
    _, most = peak(command(stacked, whole, *options))
    wanted = sums(whole)
    size = written(whole)
    shutil.rmtree(whole)
    result["BF16 renames"] = {
        "seconds": times, "rate_of_copy": medians["copy"] / medians["rename"], "peak_anonymous_mb": most,
    }  # fmt: skip
    moments = killed(stacked, whole, size, options)
    peak(command(stacked, whole, *options))
    kept = all((whole / name).stat().st_mtime_ns == time for each in moments for name, time in each.items())
    result["kills"] = {
        "files": len([name for name in wanted if name.endswith(".safetensors")]),
        "finished_at_each": [len(each) for each in moments],
        "finished_files_untouched": kept, "same_bytes": sums(whole) == wanted,
    }  # fmt: skip
    shutil.rmtree(whole)
    seconds, most = peak(command(stacked, whole, "--dtype", "fp4"))
    result["undertow to release, FP4"] = {"seconds": seconds, "peak_anonymous_mb": most}
    return result


if __name__ == "__main__":
    main()
