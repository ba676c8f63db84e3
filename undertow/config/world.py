"""The processes of a run as torchrun tells each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from undertow.config.errors import InputError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_PORTS = range(1, 65536)


@dataclass(frozen=True)
class World:
    """This process is the `rank`-th of `ranks`, and on its machine the `local_rank`-th of `local_ranks`."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int

    @staticmethod
    def of(environment: Mapping[str, str]) -> World | None:
        """What torchrun's variables say; None for a process that is alone. Raises `InputError` for odd values, and
        where some are missing."""
        if not any(name in environment for name in _VARIABLES):
            return None
        numbers = []
        for name in _VARIABLES:
            given = environment.get(name, "")
            if not (given.isascii() and given.isdigit()):
                raise InputError(f"{name} is '{given}': a whole number is expected; start the processes with torchrun")
            numbers.append(int(given))
        rank, ranks, local_rank, local_ranks = numbers
        if not (rank < ranks and local_rank < local_ranks <= ranks):
            told = ", ".join(f"{name} {number}" for name, number in zip(_VARIABLES, numbers, strict=True))
            raise InputError(f"{told}: do not belong together; start the processes with torchrun")
        if ranks == 1:
            return None
        host, port = (environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        if not host:
            raise InputError(
                "MASTER_ADDR is '': the name of rank 0's machine is expected; start the processes with torchrun"
            )
        if not (port.isascii() and port.isdigit() and int(port) in _PORTS):
            raise InputError(
                f"MASTER_PORT is '{port}': a whole number from 1 to 65535 is expected; start the processes with "
                "torchrun"
            )
        return World(*numbers)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks}"
