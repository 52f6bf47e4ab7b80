"""Predicted memory of the head against the resident set, one process a measurement.

Blocks of 128 KiB and more are given back to the system when they are freed, so that what is resident is what is alive.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from rft_models.fused_loss import chunk_for
from rft_models.head_memory import HeadPath, head_memory
from rft_models.logprobs import slab_for

_MEASURE = """
import ctypes, gc, sys
from pathlib import Path
import torch
from rft_models import logprobs
from rft_models.fused_loss import linear_loss

torch.set_num_threads(1)
rows, width, vocabulary = map(int, sys.argv[1:4])
path, frozen = sys.argv[5], sys.argv[6] == "True"
logprobs._KEEP_ELEMENTS = 10**12 if path == "kept" else 0
hidden = torch.randn(rows, width).to(getattr(torch, sys.argv[4])).requires_grad_()
weight = torch.randn(vocabulary, width).to(hidden.dtype).requires_grad_(not frozen)
targets, grad = torch.randint(0, vocabulary, (rows,)), torch.randn(rows)

def call():
    if path == "fused":
        objective = lambda found, entropy, places: found * grad[places]
        linear_loss(hidden, weight, targets, objective, epilogue="eager").loss.backward()
    else:
        logprobs.linear_logprobs(hidden, weight, targets, epilogue="eager")[0].backward(grad)
    hidden.grad = weight.grad = None

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])

call()
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
call()
print(resident("VmHWM") - before)
"""


@pytest.mark.parametrize(
    ("shape", "dtype", "path", "frozen"),
    [
        ((128, 256, 151936), "float32", "split", False),
        ((192, 384, 65536), "float32", "split", False),
        ((128, 384, 151936), "bfloat16", "split", False),
        ((256, 256, 128256), "float32", "kept", False),
        ((256, 256, 128256), "float32", "fused", False),
        ((512, 256, 65536), "float32", "kept", True),
    ],
)
def test_predicted_bytes_are_within_a_twentieth(
    shape: tuple[int, int, int], dtype: str, path: HeadPath, frozen: bool
) -> None:
    command = [sys.executable, "-c", _MEASURE, *map(str, shape), dtype, path, str(frozen)]
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100, env=env)
    measured = int(done.stdout)
    hidden = torch.empty(shape[0], shape[1], dtype=getattr(torch, dtype), device="meta")
    weight = torch.empty(shape[2], shape[1], dtype=hidden.dtype, device="meta")
    chunk = shape[0]
    if path == "fused":
        chunk = -(-chunk // -(-chunk // chunk_for(hidden, weight)))
    predicted = head_memory(*shape, hidden.dtype, chunk, slab_for(hidden, chunk), path, frozen=frozen)
    assert abs(predicted / measured - 1) <= 0.05, (
        f"predicted {predicted / 2**20:.1f}, measured {measured / 2**20:.1f} MiB"
    )
