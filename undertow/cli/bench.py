"""`undertow bench kernels` and `undertow bench step`: operators against their floors and peers, and whole steps."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undertow.cli.threads import patient_threads
from undertow.cli.values import json_pieces
from undertow.config.errors import InputError, UndertowError
from undertow.config.writing import write_file

if TYPE_CHECKING:
    import torch

    from undertow.config.world import World

_FAULTS = {"wrong": "is wrong", "failed": "failed"}
_PAUSE = 10.0  # seconds between two lines of a log

Json = Annotated[
    Path | None,
    typer.Option(
        help="Write the result, environment included, to this file; - is standard output, instead of the table. "
        "Default: none.",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Attach the verb to the command line."""
    group = typer.Typer(help="Measure operators, or training steps, with their floors and peers.")
    group.command("kernels")(kernels)
    group.command("step")(step)
    app.add_typer(group, name="bench")


def kernels(
    op: Annotated[
        list[str] | None,
        typer.Option(
            help="Operator: swa, hca, csa, pro-csa, indexer, distillation, norm, rotary, hyper, pool, swiglu, router, "
            "permute, experts, decode, invariant, loss, optimizer or quantise. Repeatable. Default: all.",
            show_default=False,
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="Tokens of each document: 4096, or 1000+3096 for two packed. Repeatable. Default: 4096, for csa also "
            "8192 and 16384, 65536 rows for quantise; 96 on a CPU.",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Peer beside our kernels: reference, torch, compile, flex, torch.topk, deep-gemm, tilelang, or none. "
            "Repeatable. Default: all; on a CPU reference, torch and torch.topk.",
            show_default=False,
        ),
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Ask for gradients of the same bits every time. Default: off.")
    ] = False,
    device: Annotated[str, typer.Option(help="Where it is measured: auto, cpu or cuda.")] = "auto",
    json: Json = None,
    peer_hooks: Annotated[
        Path | None,
        typer.Option(
            help="Measure nothing; write a Python file that offers our kernels to an outside harness. Default: none.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Time every operator on the given shapes, beside its floor, by every backend and peer that is there.

    Each is checked against the reference in float32 before it is timed; what is wrong gets no time, and ends the
    command with code 1 if it is ours.
    """
    patient_threads()
    if peer_hooks is not None:
        given = {"--op": op, "--shape": shape, "--against": against, "--deterministic": deterministic, "--json": json}
        given["--device"] = device != "auto"
        _write_hooks(peer_hooks, [name for name, value in given.items() if value])
        return
    from undertow.bench.kernels import OPS, bench_kernels, check_names, parse_shape
    from undertow.bench.table import kernels_table

    check_names("--op", op or [], OPS)
    ops = list(dict.fromkeys(op or OPS))
    place = _place(device)
    peers = _peers(against or [], place.type == "cuda")
    lengths = list(dict.fromkeys(parse_shape(text) for text in shape or []))
    _refuse_unwritable("--json", json)
    with _told() as follow:
        result = bench_kernels(ops, lengths, peers, place, deterministic, follow, _keeper(json))
    _answer(result, json, kernels_table)
    _refuse_wrong(result)


def _write_hooks(path: Path, others: Sequence[str]) -> None:
    from undertow.bench.hooks import write_hooks

    if others:
        raise InputError(f"--peer-hooks {path}: it has no use for {', '.join(others)}, which measure; leave out either")
    write_hooks(path)
    print(path)


def _place(device: str) -> torch.device:
    from undertow.bench.kernels import check_names
    from undertow.train.start import device_of

    check_names("--device", [device], ("auto", "cpu", "cuda"))
    place = device_of("auto" if device == "cuda" else device)
    if device == "cuda" and place.type == "cpu":
        raise InputError("--device cuda: torch sees no GPU here; give --device cpu or --device auto")
    return place


def _peers(against: Sequence[str], gpu: bool) -> Sequence[str]:
    from undertow.bench.kernels import PEERS, check_names

    check_names("--against", against, (*PEERS, "none"))
    if "none" in against and set(against) != {"none"}:
        others = ", ".join(name for name in against if name != "none")
        raise InputError(f"--against none: it stands for no peer, and {others} was named too; leave out one of them")
    return against or (PEERS if gpu else ("reference", "torch", "torch.topk"))


def step(
    preset: Annotated[
        str | None,
        typer.Argument(
            metavar="PRESET",
            help="Preset of the model. Default: v4-proxy, v4-tiny without a GPU.",
            show_default=False,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Keys of a recipe and their values, such as attention.csa_backend=triton.",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Measure a second setting, in which this key of the recipe differs, such as "
            "attention.backend=reference. Repeatable. Default: none.",
            show_default=False,
        ),
    ] = None,
    families: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Measure one model with the operators of these families off, on, and each on alone: fusion, "
            "attention, grouped_gemm. Default: none.",
            show_default=False,
        ),
    ] = None,
    alone: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Sequences a step where one operator is on alone; 0 leaves these settings out. Default: as in the "
            "others.",
            show_default=False,
        ),
    ] = None,
    compile: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Measure the families' reference under torch.compile too, and compile for so long at most. Default: "
            "not.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Steps that are timed, after 3 that are not, a short one with --families.")
    ] = 10,
    losses: Annotated[
        int, typer.Option(min=0, help="Steps to take at least, for loss curves; all that are taken are in the result.")
    ] = 0,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write a Chrome trace of one more step of the first setting; over processes that of rank 0, and "
            "measure the communication that each rank waits for. Default: none.",
            show_default=False,
        ),
    ] = None,
    beside: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Over processes, compare tokens/s of each with those in this result file of one. Default: none.",
            show_default=False,
        ),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=1_000_000,
            help="Start so many processes on this machine, ranks of one step. Default: one process, or those of "
            "torchrun.",
            show_default=False,
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Time training steps of a preset on seeded random tokens: tokens/s, TFLOP/s in both conventions, peak memory.

    KEY=VALUE are keys of a recipe, such as attention.csa_backend=triton, ops.indexer_select=reference or
    train.sequence_length=8192. The step is that of `undertow train`, optimizer and all. Under torchrun, or with
    --nproc, each process is a rank of one step, as parallel.expert=2 or parallel.pipeline=2 lays it out.
    """
    from undertow.config.world import World

    patient_threads()
    words = list(overrides or [])
    if preset is not None and "=" in preset:  # no preset before the first key
        preset, words = None, [preset, *words]
    world = World.of(os.environ)
    if nproc or world:
        apart = {"--against": against, "--families": families, "--alone": alone, "--compile": compile}
        _over_processes(preset, words, steps, losses, trace, beside, nproc, json, world, apart)
        return
    if beside is not None:
        raise InputError(f"--beside {beside}: it is for a step over processes; give --nproc, or leave it out")
    from undertow.bench.families import bench_families
    from undertow.bench.step import bench_step
    from undertow.bench.table import families_table, step_table

    _refuse_unwritable("--trace", trace)
    _refuse_unwritable("--json", json)
    others = {"--against": against, "--losses": losses, "--trace": trace}
    _refuse_beside_families(families, {"--alone": alone, "--compile": compile}, others)
    if families is not None:
        with _told() as follow:
            result = bench_families(preset, words, families, alone, compile, steps, os.environ, follow, _keeper(json))
        _answer(result, json, families_table)
        return
    with _told() as follow:
        result = bench_step(preset, words, against or [], steps, losses, trace, os.environ, follow, _keeper(json))
    _answer(result, json, step_table)


def _over_processes(
    preset: str | None, words: list[str], steps: int, losses: int, trace: Path | None, beside: Path | None,
    nproc: int | None, json: Path | None, world: World | None, apart: dict[str, Any],
) -> None:  # fmt: skip
    """A step of all ranks: of this one's, or of processes that are started here."""
    for name, value in apart.items():
        if value is not None:
            raise InputError(
                f"{name} {' '.join(value) if isinstance(value, list) else value}: over processes one setting is "
                "measured; leave it out, and measure each setting by a command of its own"
            )
    if world is None:
        from undertow.cli.processes import start

        given = {"--steps": steps, "--losses": losses, "--trace": trace, "--beside": beside, "--json": json}
        options = [f"{name}={value}" for name, value in given.items() if value is not None]
        start(["bench", "step", *([preset] if preset else []), *words, *options], nproc or 1)
        return
    if nproc is not None:
        raise InputError(f"--nproc {nproc}: torchrun has started {world.ranks} processes; leave --nproc out")
    from undertow.bench.ranks import bench_ranks
    from undertow.bench.ranks_table import ranks_table
    from undertow.cli.signals import following
    from undertow.parallel.start import met

    first = world.rank == 0
    with following(), met(world), _told() if first else nullcontext(lambda done, of, what: None) as follow:
        if first:
            _refuse_unwritable("--trace", trace)
            _refuse_unwritable("--json", json)
        result = bench_ranks(preset, words, steps, losses, trace, beside, os.environ, world, follow)
        if first:
            _answer(result, json, ranks_table)


def _refuse_beside_families(families: str | None, own: dict[str, Any], others: dict[str, Any]) -> None:
    """Refuse options that have no effect with, or without, --families."""
    for name, value in (own if families is None else others).items():
        if families is None and value is not None:
            raise InputError(f"{name} {value}: it belongs to --families; name the families too, or leave it out")
        if families is not None and value:
            raise InputError(f"--families {families}: it has no use for {name}; leave out either")


def _answer(result: dict[str, Any], json: Path | None, table: Callable[[dict[str, Any]], str]) -> None:
    if str(json) == "-":
        sys.stdout.writelines(json_pieces(result))
        return
    print(table(result))
    _save(result, json)


def _refuse_unwritable(option: str, path: Path | None) -> None:
    """Refuse, before anything is measured, a file that could not be written when all is."""
    if path is None or str(path) == "-":
        return
    try:
        path.lstat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise InputError(f"{option} {str(path)[:60]}...: the name is too long; give a shorter one") from None
    if not path.parent.is_dir():
        raise InputError(f"{option} {path}: there is no directory {path.parent}; name a file in one that is there")
    if path.is_dir():
        raise InputError(f"{option} {path}: it is a directory; name a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"{option} {path}: it may not be written; name another file")


def _keeper(json: Path | None) -> Callable[[dict[str, Any]], None]:
    """What writes the result so far. Where that fails it says so, once, and what is measured goes on: the table is
    still to come, and the whole file is tried again after it."""
    told = False

    def keep(part: dict[str, Any]) -> None:
        nonlocal told
        try:
            _save(part, json)
        except InputError as error:
            if not told and sys.stderr is not None:
                print(f"{error}; measuring goes on, and it is tried again", file=sys.stderr, flush=True)
            told = True

    return keep


def _save(result: dict[str, Any], json: Path | None) -> None:
    if json is not None and str(json) != "-":
        write_file(json, json_pieces(result), "give --json another file")


def _refuse_wrong(result: dict[str, Any]) -> None:
    """End with code 1 where one of our own kernels is wrong or fails."""
    from undertow.ops.registry import BACKENDS

    bad = [r for r in result["rows"] if r["way"] in BACKENDS and r["status"] in ("wrong", "failed")]
    told = [f"{row['op']} by {row['way']} ({row['shape']}) {_FAULTS[row['status']]}" for row in bad]
    told += [f"{each['op']} ({each['shape']}) failed" for each in result["failures"]]
    if told:
        raise UndertowError(f"{', '.join(told)}; the other figures stand")


@contextmanager
def _told() -> Iterator[Callable[[int, int, str], None]]:
    """What is being measured: one line that changes where standard error is a terminal, else a line now and then."""
    if sys.stderr is None:  # closed by the shell
        yield lambda done, of, what: None
        return
    terminal, begun, last = sys.stderr.isatty(), time.monotonic(), -_PAUSE

    def follow(done: int, of: int, what: str) -> None:
        nonlocal last
        spent = time.monotonic() - begun
        left = f", about {spent / done * (of - done):,.0f} s left" if done else ""
        line = f"{done} of {of}{left}: {what}"
        if terminal:
            print(f"\r\033[K{line[:100]}", end="", file=sys.stderr, flush=True)
        elif spent - last >= _PAUSE:
            print(line, file=sys.stderr, flush=True)
            last = spent

    try:
        yield follow
    finally:
        if terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
