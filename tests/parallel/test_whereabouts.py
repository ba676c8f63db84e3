"""What is said of a process is read off its stacks and torch's recorder."""

import pkgutil
import threading
import time

import pytest
import torch
import torch.distributed as dist

from undertow.parallel.dispatch import _Send
from undertow.parallel.recorder import collectives, numbers
from undertow.parallel.whereabouts import PHASES, main_thread, whereabouts


@pytest.mark.parametrize("name", PHASES)
def test_every_module_and_function_with_a_phase_exists(name):
    assert pkgutil.resolve_name(name) is not None


def _late_backward() -> tuple[list[object], int]:
    rank, group, seen = dist.get_rank(), dist.new_group(group_desc="mesh_expert"), []

    def look() -> None:
        """Once the main thread waits in its backward pass, whenever that is on a busy machine."""
        told, until = ("", False), time.monotonic() + 3
        while not (told[1] and told[0].startswith("backward")) and time.monotonic() < until:
            time.sleep(0.02)
            told = whereabouts(main_thread(), frozenset({threading.get_ident()}))
        seen.append((told, collectives()[1]))

    rows, weights = torch.ones(4, 2, requires_grad=True), torch.ones(4, requires_grad=True)
    far, more = _Send.apply(rows, weights, [2, 2], [2, 2], group)
    before = numbers()["group expert"]
    looking = threading.Thread(target=look)
    if rank == 1:
        time.sleep(1.5)
    else:
        looking.start()
    (far.sum() + more.sum()).backward()
    if rank == 0:
        looking.join()
    return seen, numbers()["group expert"] - before


def test_an_exchange_in_a_backward_pass_is_told(two):
    (seen, entered), (_, theirs) = two.run(_late_backward)
    assert entered == theirs == 2
    ((place, waits), collective), *_ = seen
    assert place.startswith("backward, exchange of experts in _both (undertow/parallel/dispatch.py:")
    assert waits and str(collective) == "all_to_all number 3 of group expert"


def _in_the_first_of_two_groups() -> int:
    first, _ = (dist.new_group(group_desc="mesh_pipeline") for _ in range(2))
    before = numbers()["group pipeline"]
    dist.all_reduce(torch.ones(1), group=first)
    return numbers()["group pipeline"] - before


def test_groups_of_one_axis_count_together(two):
    assert two.run(_in_the_first_of_two_groups) == [1, 1]


def test_what_is_not_of_a_run():
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    assert whereabouts(thread.ident or 0) == ("outside Undertow", False)
    over.set()
    thread.join()
    assert whereabouts(0) == ("at its end", False)
