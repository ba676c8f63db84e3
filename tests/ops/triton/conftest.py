"""Kernels run on the GPU if there is one, otherwise in Triton's interpreter, mended."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    from undertow.ops.triton.interpreter import repair

    repair()
    return "cpu"


@pytest.fixture(scope="session", params=["integers", "instructions"] if torch.cuda.is_available() else ["integers"])
def hardware(request) -> bool:
    """Whether the chip converts to FP8 itself; the interpreter has no chip."""
    return request.param == "instructions"
