"""The gang itself: results in order, the first error with its rank, silent and dead ranks, and order afterwards."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.parallel.gang import RankError


def total(start):
    value = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(value)
    return dist.get_rank(), int(value), torch.get_num_threads()


def only_rank_one_fails():
    if dist.get_rank() == 1:
        raise ValueError("a number that no other rank has: 17")
    dist.all_reduce(torch.ones(1))


def every_rank_fails():
    time.sleep(0.2 * (dist.get_world_size() - dist.get_rank()))
    raise ValueError(f"from {dist.get_rank()}")


def oversleep():
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(1))


def leave():
    if dist.get_rank() == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(1))


def lambda_as_result():
    return lambda: None


def test_results_stand_in_the_order_of_ranks(two, four):
    assert two.run(total, 10) == [(0, 21, 1), (1, 21, 1)]
    assert four.run(total, start=1) == [(rank, 10, 1) for rank in range(4)]


def test_processes_stay(two):
    assert two.run(os.getpid) == two.pids == two.run(os.getpid)


def test_the_first_error_is_shown_and_the_gang_goes_on(two):
    before = two.run(os.getpid)
    with pytest.raises(RankError, match="rank 1 of 2 raised") as caught:
        two.run(every_rank_fails)
    assert "ValueError: from 1" in str(caught.value) and "every_rank_fails" in str(caught.value)
    assert two.run(total, 0)[0][1] == 1 and two.pids == before


def test_a_result_that_cannot_be_sent_is_an_error_of_the_rank(two):
    with pytest.raises(RankError, match=r"rank \d of 2 raised(.|\n)*pickle"):
        two.run(lambda_as_result)


def test_an_error_frees_those_who_wait_for_the_rank(two):
    with pytest.raises(RankError, match=r"rank 1 of 2 raised(.|\n)*no other rank has: 17"):
        two.run(only_rank_one_fails)
    assert two.run(total, 0)[1] == (1, 1, 1)


def test_silent_and_dead_ranks_are_named(two):
    two.run(total, 0)  # so that the ranks know this file: their time begins in the function
    with pytest.raises(RankError) as caught:
        two.run(oversleep, seconds=2)
    silent, waits = str(caught.value).split("; ")
    assert silent.startswith("no answer within 2 s: rank 1 of 2 is silent in oversleep (test_gang.py:")
    assert waits.startswith("rank 0 of 2 waits in ") and "called by oversleep" in waits
    assert two.pids == []
    with pytest.raises(RankError, match=r"^rank 1 of 2 died with exit code 3"):
        two.run(leave)
