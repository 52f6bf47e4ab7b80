"""Without a GPU the kernels run in Triton's interpreter, which reads its switch when a kernel is defined."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(1)
settings.register_profile("rft", deadline=None, max_examples=25, derandomize=True, database=None)
settings.load_profile("rft")


@pytest.fixture(scope="session")
def device() -> str:
    """The GPU where there is one, and then the kernels are compiled."""
    return "cuda" if torch.cuda.is_available() else "cpu"
