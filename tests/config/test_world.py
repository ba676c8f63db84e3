"""What torchrun tells a process about the others."""

import pytest

from undertow.config.errors import InputError
from undertow.config.world import World

TOLD = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TOLD |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_a_process_knows_its_place():
    assert World.of(TOLD) == World(rank=3, ranks=4, local_rank=1, local_ranks=2)
    assert str(World.of(TOLD)) == "rank 3 of 4"
    alone = dict.fromkeys(TOLD, "1") | {"RANK": "0", "LOCAL_RANK": "0"}
    assert World.of({}) is None and World.of(alone) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "x"}, "RANK is 'x': a whole number is expected; start the processes with torchrun"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is '': a whole number"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is '': the name of rank 0's machine is expected"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is '99999': a whole number from 1 to 65535"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK is '': a whole number"),
        ({"RANK": "4"}, "RANK 4, WORLD_SIZE 4, LOCAL_RANK 1, LOCAL_WORLD_SIZE 2: do not belong together"),
        ({"LOCAL_WORLD_SIZE": "8"}, "RANK 3, WORLD_SIZE 4, LOCAL_RANK 1, LOCAL_WORLD_SIZE 8: do not"),
    ],
)
def test_odd_values_are_told(change, message):
    with pytest.raises(InputError) as refusal:
        World.of(TOLD | change)
    assert str(refusal.value).startswith(message)


def test_a_rank_among_nobody_knows_how_many_is_told():
    with pytest.raises(InputError) as refusal:
        World.of({"RANK": "0"})
    assert str(refusal.value).startswith("WORLD_SIZE is '': a whole number is expected")
