"""What became of a model's calls: how many each backend took, and why kernels passed one on."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Calls:
    """Of the operators that a kernel was chosen for: calls by operator and backend, and the ones passed on, each
    operator and reason once. Of any other operator the reference takes every call, uncounted."""

    taken: dict[str, dict[str, int]] = field(default_factory=dict)
    passed: list[tuple[str, str]] = field(default_factory=list)
    _told: int = 0

    def count(self, op: str, backend: str, chosen: str, reason: str) -> None:
        """One call of `op` by `backend`; `reason` says why the `chosen` one refused it, "" where it did not."""
        by = self.taken.setdefault(op, {})
        by[backend] = by.get(backend, 0) + 1
        passed = (op, f"by {backend} instead of {chosen}: {reason}")
        if reason and passed not in self.passed:
            self.passed.append(passed)

    def news(self) -> list[str]:
        """A sentence for each reason why calls were passed on that was not given before, with its operators."""
        found: dict[str, list[str]] = {}
        for op, why in self.passed[self._told :]:
            found.setdefault(why, []).append(op)
        self._told = len(self.passed)
        return [f"{', '.join(ops)} {why}" for why, ops in found.items()]
