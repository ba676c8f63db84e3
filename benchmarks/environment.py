"""What every result file says about where it was measured."""

from undertow.bench.environment import environment

__all__ = ["environment"]
