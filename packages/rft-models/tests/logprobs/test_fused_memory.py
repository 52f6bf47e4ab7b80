"""Predicted memory of the head against the resident set, one process a measurement.

Blocks of 128 KiB and more are given back to the system when they are freed, so that what is resident is what is alive.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch
from head_memory import HeadPath, head_memory

from rft_models.logprobs.fused_loss import chunk_for
from rft_models.logprobs.linear_logprobs import slab_for

_MEASURE = """
import ctypes, gc, json, os, sys
from pathlib import Path
import torch
from rft_models.logprobs import linear_logprobs as logprobs
from rft_models.logprobs.fused_loss import linear_loss

torch.set_num_threads(1)

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])

def measure(shape, dtype, path, frozen):
    rows, width, vocabulary = shape
    logprobs.KEPT_LOGITS = 10**12 if path == "kept" else 0
    hidden = torch.full((rows, width), 0.1, dtype=getattr(torch, dtype), requires_grad=True)
    weight = torch.full((vocabulary, width), 0.1, dtype=hidden.dtype, requires_grad=not frozen)
    targets, grad = torch.randint(0, vocabulary, (rows,)), torch.randn(rows)

    def call():
        if path == "fused":
            objective = lambda found, entropy, places: found * grad[places]
            linear_loss(hidden, weight, targets, objective, epilogue="eager").loss.backward()
        else:
            logprobs.linear_logprobs(hidden, weight, targets, epilogue="eager")[0].backward(grad)
        hidden.grad = weight.grad = None

    call()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before

for case in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        print(measure(*case), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""

CASES: list[tuple[tuple[int, int, int], str, HeadPath, bool]] = [
    ((64, 256, 151936), "float32", "split", False),
    ((96, 384, 65536), "float32", "split", False),
    ((64, 384, 151936), "bfloat16", "split", False),
    ((128, 256, 128256), "float32", "kept", False),
    ((256, 256, 128256), "float32", "fused", False),
    ((256, 256, 65536), "float32", "kept", True),
]


def predicted(case: tuple[tuple[int, int, int], str, HeadPath, bool]) -> int:
    shape, dtype, path, frozen = case
    hidden = torch.empty(shape[0], shape[1], dtype=getattr(torch, dtype), device="meta")
    weight = torch.empty(shape[2], shape[1], dtype=hidden.dtype, device="meta")
    chunk = shape[0]
    if path == "fused":
        chunk = -(-chunk // -(-chunk // chunk_for(hidden, weight)))
    return head_memory(*shape, hidden.dtype, chunk, slab_for(hidden, chunk), path, frozen=frozen)


def test_predicted_bytes_are_within_a_twentieth() -> None:
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _MEASURE, json.dumps(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200, env=env)
    for case, line in zip(CASES, done.stdout.splitlines(), strict=True):
        expected, size = predicted(case), int(line)
        message = f"{case}: predicted {expected / 2**20:.1f}, measured {size / 2**20:.1f} MiB"
        assert abs(expected / size - 1) <= 0.05, message
