"""Gangs of two and four ranks for the whole session; with `--dist loadgroup` one worker holds both."""

import pytest
import torch

from tests.parallel.gang import Gang

GANGS = {"two", "four"}


def pytest_collection_modifyitems(items):
    for item in items:
        if GANGS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.multi)
            item.add_marker(pytest.mark.xdist_group("gang"))


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
