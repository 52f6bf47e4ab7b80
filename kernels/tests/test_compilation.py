"""The kernels go through Triton's compiler down to machine code, which needs no GPU; running them does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# in a process of its own, because this one may hold the interpreter's versions of the kernels
PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rft_kernels import triton_rows

NUMBERS = {"row_stride": "i32", "vocab_size": "i32", "temperature": "fp32", "TILE": "constexpr"}
FORWARD = ("logprobs_ptr", "entropy_ptr", "lse_ptr")
BACKWARD = ("lse_ptr", "entropy_ptr", "grad_logprobs_ptr", "grad_entropy_ptr", "grad_lse_ptr")

for capability in (80, 90):
    for dtype in ("fp32", "bf16"):
        inputs = {"logits_ptr": "*" + dtype, "targets_ptr": "*i64"}
        forward = inputs | {name: "*fp32" for name in FORWARD} | NUMBERS
        backward = inputs | {name: "*fp32" for name in BACKWARD} | {"grad_ptr": "*" + dtype} | NUMBERS
        for kernel, signature in ((triton_rows._forward_row, forward), (triton_rows._backward_tile, backward)):
            source = ASTSource(fn=kernel, signature=signature, constexprs={"TILE": 4096})
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
            print(kernel.__name__, capability, dtype, len(compiled.asm["cubin"]) > 0)
"""


def test_every_kernel_compiles_for_two_gpu_generations(tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 8
    assert all(line.endswith("True") for line in lines)
