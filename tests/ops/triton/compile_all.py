"""Compiles kernels for chips ahead of time, in processes without the interpreter, and keeps their facts as JSON.

python -m tests.ops.triton.compile_all CHIP few|all    prints the facts of one chip
python -m tests.ops.triton.compile_all --record        writes those of all chips for the Triton that is installed
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = Path(__file__).with_name("facts")
CHIPS = ("gfx942", "gfx950", "sm_90")
OTHERS = (
    *("norm", "hyper", "compress", "routing", "grouped", "quantised", "swiglu", "cross_entropy", "optimizer"),
    "invariant",
)
COMMAND = "python -m tests.ops.triton.compile_all"

Kept = dict[str, dict[str, object]]
"""By kernel: what `undertow.ops.triton.compiled.Facts` says of it."""

Case = tuple[str, bool, Callable[[], object]]
"""A name, whether it is among the few that always run, and a call that launches kernels."""


def quantising(chip: str) -> Iterator[Case]:
    """Small floats of wide matrices in every block that has a kernel, and records of cache entries."""
    import torch

    from undertow.ops.triton import block_scales, mxfp4, records

    hardware = chip != "gfx942"
    x, turned = (torch.empty(4096, wide, dtype=torch.bfloat16, device="meta") for wide in (4096, 512))
    mxfp4._takes_pairs = lambda device: chip == "sm_90"

    def there_and_back(rows: int, columns: int, ue8m0: bool) -> None:
        codes, scales = block_scales.quantise_blocks(x, rows, columns, ue8m0=ue8m0, hardware=hardware)
        for fnuz in (False, True):
            options = {"fnuz": fnuz, "hardware": hardware}
            block_scales.dequantise_blocks(codes, scales, rows, columns, torch.bfloat16, **options)

    for rows, columns, ue8m0 in (
        *((1, 128, True), (1, 128, False), (1, 64, True), (1, 32, True)),
        *((128, 128, True), (128, 128, False), (32, 32, True)),
    ):
        name = f"blocks of {rows}x{columns}, scales in {'ue8m0' if ue8m0 else 'float32'}"
        yield name, False, partial(there_and_back, rows, columns, ue8m0)
    odd = torch.empty(4095, 4095, dtype=torch.bfloat16, device="meta")
    for ue8m0 in (True, False):
        name = f"blocks of 128x128, scales in {'ue8m0' if ue8m0 else 'float32'}, odd sizes"
        yield name, False, partial(block_scales.quantise_blocks, odd, 128, 128, ue8m0=ue8m0, hardware=hardware)
    yield "mxfp4", True, lambda: mxfp4.read_mxfp4(*mxfp4.write_mxfp4(x))
    yield (
        *("records", True),
        lambda: records.read_records(
            records.write_records(turned, 64, 584, 1e-4, hardware=hardware), 512, 64, hardware=hardware
        ),
    )


def attention() -> Iterator[Case]:
    """Forward and backward, of 64 heads and of 128, in every form that slabs take."""
    import torch

    from undertow.ops.segments import Segments
    from undertow.ops.triton.attention.backward import backward
    from undertow.ops.triton.attention.forward import forward

    def both(tokens: int, heads: int, ratio: int, keep: int | None, deterministic: bool = False) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        segments = Segments.from_lengths([tokens], device="meta")
        q, window, sink = empty(tokens, heads, 512), empty(tokens, 512), empty(heads, dtype=torch.float32)
        entries = empty(tokens // ratio, 512) if ratio else None
        selected = empty(tokens, keep, dtype=torch.int64) if keep else None
        sizes = {"window_size": 128, "ratio": ratio, "scale": 512**-0.5}
        o, lse, chosen = forward(q, window, entries, selected, sink, segments, **sizes)
        backward(
            q, window, entries, sink, o, lse, torch.empty_like(o), chosen, segments,
            **sizes, keep=keep, deterministic=deterministic,
        )  # fmt: skip

    yield "window of 4096", False, lambda: both(4096, 64, 0, None)
    yield "one in 128 of 4096", True, lambda: both(4096, 64, 128, None)
    yield "one in 128 of 8192", False, lambda: both(8192, 64, 128, None)
    yield "512 of one in 4 of 16384", False, lambda: both(16384, 64, 4, 512)
    yield "the same, deterministic", False, lambda: both(16384, 64, 4, 512, deterministic=True)
    yield "128 heads, window of 4096", False, lambda: both(4096, 128, 0, None)
    yield "128 heads, 1024 of one in 4 of 32768", False, lambda: both(32768, 128, 4, 1024)


def indexing() -> Iterator[Case]:
    """Scores, the choice of the best and the distillation, with everything in one run of tokens and in several."""
    import torch

    from undertow.ops.segments import Rows, Segments, entry_rows
    from undertow.ops.triton.indexer.distillation import indexer_distillation
    from undertow.ops.triton.indexer.select import indexer_select

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16, learns: bool = False) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=learns)

    def operands(tokens: int, learns: bool) -> tuple[torch.Tensor, Rows, torch.Tensor, Segments]:
        segments = Segments.from_lengths([tokens], device="meta")
        keys = Rows(empty(tokens // 4, 128, learns=learns), segments.layout(entry_rows(4)))
        return empty(tokens, 64, 128, learns=learns), keys, empty(tokens, 64, learns=learns), segments

    def select(tokens: int) -> None:
        q, keys, weights, segments = operands(tokens, learns=False)
        indexer_select(q, keys, weights, 512, segments, 4)

    def distil(tokens: int, keep: int | None) -> None:
        q, keys, weights, segments = operands(tokens, learns=True)
        taught = (
            empty(tokens, 64, 512),
            Rows(empty(tokens // 4, 512), keys.layout),
            empty(tokens, 64, dtype=torch.float32),
        )
        selected = empty(tokens, keep, dtype=torch.int64) if keep else None
        loss = indexer_distillation(q, keys, weights, *taught, selected, segments, ratio=4, scale=512**-0.5)
        loss.backward(torch.empty_like(loss))

    yield "best 512 of 1024", True, lambda: select(4096)
    yield "best 512 of 65536", False, lambda: select(1 << 18)
    yield "distillation over 1024", False, lambda: distil(4096, None)
    yield "distillation over 512 of 4096", False, lambda: distil(16384, 512)


def others() -> Iterator[Case]:
    """Of the families that keep theirs in a file of their own."""
    for name in OTHERS:
        yield from importlib.import_module(f"tests.ops.triton.compiled_{name}").cases()


def cases(chip: str) -> list[Case]:
    """All calls that launch kernels on a chip, the few before the others."""
    return sorted([*quantising(chip), *attention(), *indexing(), *others()], key=lambda case: not case[1])


def compile_as(chip: str) -> None:
    """Make every family of kernels take the tiles of a chip."""
    for name, module in list(sys.modules.items()):
        if name.startswith("undertow.ops.triton.") and hasattr(module, "architecture"):
            module.architecture = lambda device: chip


def compile_all(chip: str, few: bool) -> Kept:
    """Facts by case and kernel. A kernel counts with the first case that compiles it, and is numbered if that compiles
    several of its name, for other sizes."""
    from undertow.ops.triton.compiled import CHIPS, compiling

    known = cases(chip)
    for path in (ROOT / "undertow/ops/triton").glob("*/tiles.py"):
        importlib.import_module(f"undertow.ops.triton.{path.parent.name}.tiles")
    compile_as(chip)
    kept: Kept = {}
    with compiling(CHIPS[chip]) as found:
        for case, always, call in known:
            if few and not always:
                break
            found.clear()
            call()
            names: Counter[str] = Counter()
            for name, facts in found:
                names[name] += 1
                key = f"{case}: {name.removeprefix('_')}{f' {names[name]}' if names[name] > 1 else ''}"
                numbers = {"shared": facts.shared, "registers": facts.registers, "spilled": facts.spilled}
                kept[key] = {**numbers, "matrix": dict(facts.matrix)}
    return kept


def facts_of(chip: str, which: str) -> Kept:
    """From a process of its own, since the interpreter replaces kernels where they are defined, and a fresh cache."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, "-W", "ignore", "-m", "tests.ops.triton.compile_all", chip, which]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"compiling for {chip} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def recorded(chip: str) -> dict[str, Kept]:
    """What the repository holds of a chip, by version of Triton."""
    return json.loads((FOLDER / f"{chip}.json").read_text())


def written(versions: dict[str, Kept]) -> str:
    """The text of a file of facts: sorted, a kernel a line."""
    blocks = []
    for version in sorted(versions):
        lines = [
            f"  {json.dumps(name)}: {json.dumps(facts, sort_keys=True)}"
            for name, facts in sorted(versions[version].items())
        ]
        blocks.append(f" {json.dumps(version)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def record() -> None:
    """Write the facts of all chips for the installed Triton beside those of other versions."""
    import triton

    FOLDER.mkdir(exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda chip: facts_of(chip, "all"), CHIPS))
    for chip, facts in zip(CHIPS, found, strict=True):
        path = FOLDER / f"{chip}.json"
        versions = recorded(chip) if path.exists() else {}
        fresh = path.with_suffix(".writing")
        fresh.write_text(written({**versions, triton.__version__: facts}))
        os.replace(fresh, path)


if __name__ == "__main__":
    if sys.argv[1:] == ["--record"]:
        record()
    else:
        print(json.dumps(compile_all(sys.argv[1], few=sys.argv[2] == "few")))
