"""Telling apart, without importing torch, a want of memory from a fault of the program."""

from __future__ import annotations

_CPU_SAYS = ("can't allocate memory", "not enough memory")


def out_of_memory(error: BaseException) -> str | None:
    """What does not fit, in one line, when `error` is a refused allocation; None for any other error.

    Torch raises `OutOfMemoryError` for a GPU and a bare `RuntimeError` for the CPU, known by its text alone.
    """
    refused = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if not refused and not (isinstance(error, RuntimeError) and any(text in str(error) for text in _CPU_SAYS)):
        return None
    said = (str(error).strip() or "the machine has none left").splitlines()[0]
    return f"out of memory: {said}; take a smaller model, batch or sequence"
