"""The device of these tests."""

import pytest
import torch


@pytest.fixture
def cpu() -> torch.device:
    return torch.device("cpu")
