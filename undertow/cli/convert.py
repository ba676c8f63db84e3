"""`undertow convert`: a model directory in another format, streamed within bounded memory."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from undertow.cli.signals import terminable
from undertow.config.errors import InputError
from undertow.config.spelling import some

if TYPE_CHECKING:
    from undertow.checkpoint.convert.conversion import Report

_PATIENCE = 1.0  # seconds before anything is shown, and between two updates on a terminal
_LINE = 10.0  # seconds between two lines where there is no terminal


class To(StrEnum):
    """Formats of names."""

    released = "released"
    transformers = "transformers"
    undertow = "undertow"


class Numbers(StrEnum):
    """Number formats of the weights."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp8 = "fp8"
    fp4 = "fp4"


class Spoken(StrEnum):
    """Dialects of FP8."""

    ocp = "ocp"
    fnuz = "fnuz"


def register(app: typer.Typer) -> None:
    """Attach the verb to the command line."""
    app.command("convert")(convert)


def convert(
    src: Annotated[str, typer.Argument(help="Model directory in any format, or a run: then its latest checkpoint.")],
    dst: Annotated[str, typer.Argument(help="Directory to make; it appears when it is complete.")],
    to: Annotated[To, typer.Option(help="Names of the tensors and of config.json.")] = To.released,
    dtype: Annotated[
        Numbers | None,
        typer.Option(
            help="Numbers of the weights; fp4 is the release's own: experts FP4, other matrices FP8. Default: those of "
            "SRC, BF16 where the format holds no FP8.",
            show_default=False,
        ),
    ] = None,
    dialect: Annotated[
        Spoken | None, typer.Option(help="FP8 dialect. Default: that of SRC, else ocp.", show_default=False)
    ] = None,
    shard_bytes: Annotated[int, typer.Option(help="Largest file, in bytes; a larger tensor has its own.")] = 5 * 10**9,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read DST again and compare sums and every number. Default: off.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check SRC and the disk, say what would be done. Default: off.")
    ] = False,
) -> None:
    """Convert between the released, the transformers and Undertow's own format, FP8 and FP4 included."""
    if not src or not dst:
        raise InputError("a path is empty: give the directory to read and the one to make")
    from undertow.checkpoint.convert.conversion import convert as run
    from undertow.checkpoint.convert.target import Wish

    wish = Wish(to.value, dtype.value if dtype else None, dialect.value if dialect else None)
    with terminable():
        gauge = _Gauge()
        try:
            report = run(src, dst, wish, shard_bytes, verify, dry_run, gauge.show)
        except KeyboardInterrupt:
            gauge.clear()
            print("interrupted: the same command goes on after the last finished file", file=sys.stderr)
            raise
        finally:
            gauge.clear()
    _tell(report, dst, wish.spelling)


def _tell(report: Report, target: str, spelling: str) -> None:
    verb = "finished already:" if report.already else "wrote" if report.done else "would write"
    print(f"read {report.source}: {report.spelling} names")
    count = f"{report.files} file{'s' if report.files > 1 else ''}"
    size = f"{report.tensors} tensors, {_size(report.size)} in {count}"
    print(f"{verb} {target}: {spelling} names, {size}")
    if report.resumed and not report.already:
        print(f"{report.resumed} of {count} {'were' if report.resumed > 1 else 'was'} finished before")
    if report.rounded:
        known = report.done or report.already
        print(f"{report.rounded} tensors {'are' if known else 'may be'} rounded: their new type holds fewer bits")
    if report.scales_gone:
        print("scales.safetensors is gone: the way back makes new scales, whose bytes may differ")
    elif report.scales:
        print(f"{report.scales} tensors of scales are kept in scales.safetensors, for the same bytes on the way back")
    if report.drafts:
        first = some(list(report.drafts), 1)
        print(f"{len(report.drafts)} tensors of draft modules that are not known pass unchanged ({first})")
    if report.left:
        state = ", the optimizer's state among them" if "optimizer.safetensors" in report.left else ""
        print(f"left behind{state}: {some(list(report.left), 6)}")
    if report.done:
        print("verified: sums and numbers agree with the source" if report.verified else "sums are in SHA256SUMS")


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


class _Gauge:
    """Bytes done, rate and time left: one changing line on a terminal, a line at times elsewhere."""

    def __init__(self) -> None:
        self._begun = self._last = time.monotonic()
        self._first: int | None = None
        self._what, self._shown = "", False
        self._terminal = sys.stderr is not None and sys.stderr.isatty()

    def show(self, what: str, done: int, of: int) -> None:
        """Called often; most calls show nothing."""
        now = time.monotonic()
        if self._first is None or what == "verifying" != self._what:
            self._first, self._begun = done, now
        self._what = what
        if sys.stderr is None or now - self._last < (_PATIENCE if self._terminal else _LINE):
            return
        self._last = now
        rate = (done - self._first) / max(now - self._begun, 1e-9)
        left = f"{(of - done) / rate:.0f} s left" if rate else "..."
        text = f"{what}: {_size(done)} of {_size(of)}, {rate / 1e6:.0f} MB/s, {left}"
        if self._terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
            self._shown = True
        else:
            print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
