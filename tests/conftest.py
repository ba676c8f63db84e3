"""What holds for every test: a property may take its time, so that a busy machine fails nothing, and kernels run."""

import os

import torch
from hypothesis import settings

settings.register_profile("undertow", deadline=None)
settings.load_profile("undertow")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read by Triton where a kernel is defined
