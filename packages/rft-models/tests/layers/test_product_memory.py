"""Products of ever other numbers of rows leave no memory behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rft_models.layers import fast_linear

pytestmark = pytest.mark.skipif(not fast_linear._onednn_answers(), reason="this build of torch has no such operator")

PROGRAM = """
import torch
from rft_models.layers.fast_linear import linear

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

torch.set_num_threads(1)
weight = torch.randn(512, 512)
with torch.no_grad():
    linear(torch.randn(600, 512), weight)
    before = resident()
    for rows in range(100, 600):
        linear(torch.randn(rows, 512), weight)
print(resident() - before)
"""
WITHOUT_A_BOUND_MIB = 409.76


def test_five_hundred_numbers_of_rows_leave_little_memory_behind() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert float(done.stdout) < WITHOUT_A_BOUND_MIB / 3
