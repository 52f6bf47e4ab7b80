"""The kernels go through Triton's compiler down to machine code, which needs no GPU; running them does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# in a process of its own, because this one may hold the interpreter's versions of the kernels
COMMON = """
import re
import subprocess
import sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
INTEGERS = {"targets_ptr", "argmax_ptr", "parts_argmax_ptr"}


def signature(kernel, matrices, descriptors=()):
    types = {}
    for name in kernel.arg_names:
        if name in descriptors:
            types[name] = descriptors[name]
        elif name in matrices:
            types[name] = "*" + matrices[name]
        elif name.endswith("_ptr"):
            types[name] = "*i64" if name in INTEGERS else "*fp32"
        elif name in ("temperature", "inverse_temperature", "softcap"):
            types[name] = "fp32"
        else:
            types[name] = "constexpr" if name.isupper() else "i32"
    return types


def compiled(kernel, types, constants, capability, **options):
    # what a launch finds to be a multiple of 16, which vector loads and copies of tiles depend on
    lengths = ("stride", "columns", "width")
    aligned = [name for name, kind in types.items() if kind.startswith("*") or name.endswith(lengths)]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def stack_bytes(binary):
    path = Path(sys.argv[1]) / "kernel.cubin"
    path.write_bytes(binary.asm["cubin"])
    listing = subprocess.run([TOOL, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    return re.findall(r"STACK:([0-9]+)", listing)
"""

ROWS = """
from rft_kernels.triton import row_kernels as triton_rows

for capability in (80, 90):
    for dtype in ("fp32", "bf16"):
        for kernel in (triton_rows._forward_row, triton_rows._backward_tile):
            matrices = {"logits_ptr": dtype, "grad_ptr": dtype}
            binary = compiled(kernel, signature(kernel, matrices), {"TILE": 4096}, capability, num_warps=8)
            print(kernel.__name__, capability, dtype, *stack_bytes(binary))
"""

SLABS = """
from rft_kernels.triton import merge as triton_merge; from rft_kernels.triton import vocab_slabs as triton_slabs

for capability in (80, 90):
    types = signature(triton_merge._merge_rows, {})
    print("merge", capability, *stack_bytes(compiled(triton_merge._merge_rows, types, {"ROWS": 128}, capability)))
    for dtype, full in (("fp32", True), ("bf16", capability == 80)):
        for kernel in (triton_slabs._slab_sums_rows, triton_slabs._slab_gradient_tile):
            constants = {"IGNORED": -100, "HAS_BIAS": full, "HAS_SOFTCAP": full, "ROWS": 1}
            constants["TILE"] = triton_slabs._TILE
            if "HAS_ENTROPY_GRAD" in kernel.arg_names:
                constants["HAS_ENTROPY_GRAD"] = full
            types = signature(kernel, {"products_ptr": dtype, "bias_ptr": dtype})
            binary = compiled(kernel, types, constants, capability, num_warps=8)
            assert "ld.global.v4" in binary.asm["ptx"], "loads are not of 16 bytes"
            print(kernel.__name__, capability, dtype, full, *stack_bytes(binary))
"""

FUSED = """
from dataclasses import replace
from rft_kernels.triton import fused_logprobs as triton_fused
from rft_kernels.tiles import FLOAT32, HOPPER, OLDER

def built(tiles, dtype, capability, descriptors):
    shapes = {"hidden": [tiles.rows, tiles.hidden], "weight": [tiles.vocab, tiles.hidden]}
    described = {name: f"tensordesc<{dtype}{shape}>" for name, shape in shapes.items()} if descriptors else {}
    kernel = triton_fused._fused_tiles
    constants = {"IGNORED": -100, "HAS_BIAS": False, "HAS_SOFTCAP": False, "DESCRIPTORS": descriptors, "WIDEN": False}
    constants |= {"WHOLE_STEPS": True, "ROWS": tiles.rows, "VOCAB": tiles.vocab, "HIDDEN": tiles.hidden}
    constants |= {"GROUP": tiles.group, "FLAT": tiles.flat}
    types = signature(kernel, {"hidden": dtype, "weight": dtype, "bias_ptr": dtype}, described)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    options |= {} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}
    return compiled(kernel, types, constants, capability, **options)

for tiles in dict.fromkeys(replace(tiles, group=16) for tiles in HOPPER):  # the group changes no register
    binary = built(tiles, "bf16", 90, True)
    assert "wgmma.mma_async" in binary.asm["ptx"], "products do not go through the tensor cores' own instruction"
    assert "cp.async.bulk.tensor" in binary.asm["ptx"], "tiles do not come through the copy engine"
    assert binary.metadata.shared * tiles.programs_per_sm <= 227 * 1024
    print(tiles, *stack_bytes(binary))
print("pointers", *stack_bytes(built(HOPPER[0], "bf16", 90, False)))
print("float32", *stack_bytes(built(FLOAT32, "fp32", 90, False)))
assert "mma.sync" in built(OLDER, "bf16", 80, False).asm["ptx"]
"""


NUM_KERNELS = 8 + 10 + 10


def test_every_kernel_compiles_without_a_spilled_register(tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = tmp_path / "program.py"
    path.write_text(COMMON + ROWS + SLABS + FUSED)
    done = subprocess.run(
        [sys.executable, path, tmp_path],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == NUM_KERNELS
    assert [line for line in lines if not line.endswith(" 0")] == []
