"""Gangs of two and four ranks for the whole session; with `--dist loadgroup` one worker holds each."""

import pytest
import torch

from tests.parallel.gang import Gang

GANGS = {"two": 2, "four": 4}


def pytest_collection_modifyitems(items):
    for item in items:
        held = [name for name in GANGS if name in getattr(item, "fixturenames", ())]
        if held:
            item.add_marker(pytest.mark.multi)
            item.add_marker(pytest.mark.xdist_group("+".join(held)))


@pytest.fixture(scope="session")
def two():
    gang = Gang(2)
    yield gang
    gang.close()


@pytest.fixture(scope="session")
def four():
    gang = Gang(4)
    yield gang
    gang.close()


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
