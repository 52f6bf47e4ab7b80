"""Without a GPU the kernels run in Triton's interpreter, which reads its switch when a kernel is defined."""

from __future__ import annotations

import os
from typing import Any, cast

import numpy
import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl

torch.set_num_threads(1)
settings.register_profile("rft", deadline=None, max_examples=25, derandomize=True, database=None)
settings.load_profile("rft")


@triton.jit
def _double_rows(numbers_ptr, row_stride, scale, COLUMNS: tl.constexpr):
    columns = tl.arange(0, COLUMNS)
    place = numbers_ptr + tl.program_id(0).to(tl.int64) * row_stride
    total = 0.0
    for first in range(0, row_stride, COLUMNS):
        total += tl.sum(tl.load(place + first + columns, mask=first + columns < row_stride, other=0.0), axis=0)
    tl.store(place, total * scale)


def _interpreter_failure() -> str | None:
    """Why Triton's interpreter cannot run here, or None: not every version of it runs with every numpy."""
    numbers = torch.ones(2, 5)
    try:
        cast(Any, _double_rows)[(2,)](numbers, 5, 2.0, COLUMNS=4)
    except (TypeError, AttributeError, ValueError, RuntimeError, triton.TritonError) as error:
        return f"Triton {triton.__version__}'s interpreter fails with numpy {numpy.__version__}: {error}"
    return None if numbers[:, 0].tolist() == [10.0, 10.0] else "Triton's interpreter adds wrongly"


@pytest.fixture(scope="session")
def device() -> str:
    """The GPU where there is one, and then the kernels are compiled; else the CPU, by the interpreter."""
    if torch.cuda.is_available():
        return "cuda"
    failure = _interpreter_failure()
    if failure is not None:
        pytest.skip(failure)
    return "cpu"
