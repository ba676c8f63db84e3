"""Standard streams as a shell may hand them over: closed, full, or of an encoding that lacks characters."""

from __future__ import annotations

import io
import os
import sys

from undertow.config.errors import InputError, UndertowError


def prepare_output() -> None:
    """Let every character be written, as an escape where the encoding lacks it.

    Raises `UndertowError` for a closed standard output: without one, a verb would do its work for nobody.
    """
    if sys.stdout is None:
        raise UndertowError("standard output is closed: send it to a file, or to /dev/null")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drop_output() -> None:
    """Discard what could not be written, which Python would otherwise try again at its exit and complain about."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_prompt() -> str:
    """Standard input less its last newline. Raises `InputError` where it is closed, a terminal or not text."""
    if sys.stdin is None or sys.stdin.isatty():
        raise InputError("no prompt: give --prompt TEXT, --prompt-ids 0,17,5, or text on standard input")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"standard input is not {error.encoding} text: byte {error.object[error.start]:#04x} at {error.start}"
        ) from None
