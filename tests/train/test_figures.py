"""Figures of a step: the load of experts, and throughput in both conventions."""

import pytest
import torch

from undertow.train.figures import expert_load, peak_memory


def test_load_is_in_multiples_of_an_even_share_over_all_layers():
    # 12 tokens, 2 choices each: an even share of 4 experts is 6; the MTP block saw 8 tokens, an even share of 4.
    counts = torch.tensor([[6, 6, 6, 6], [12, 4, 6, 2], [4, 4, 7, 1]])
    told = expert_load(counts, [False] * 3, 2, 12)
    assert told == {"moe/load_max": 2.0, "moe/load_min": 0.25, "moe/dropped_share": 0.0}


def test_layers_whose_load_the_token_ids_decide_do_not_count_beside_others():
    counts = torch.tensor([[24, 0, 0, 0], [9, 3, 6, 6]])
    assert expert_load(counts, [True, False, False], 2, 12)["moe/load_max"] == 1.5
    assert expert_load(counts[:1], [True], 2, 12)["moe/load_max"] == 4.0


def test_choices_that_nobody_served_are_a_share():
    assert expert_load(torch.tensor([[3, 3], [3, 3]]), [False] * 2, 2, 4)["moe/dropped_share"] == pytest.approx(0.25)


def test_peak_memory_of_a_process_is_in_bytes():
    assert 2**26 < peak_memory(torch.device("cpu")) < 2**40
