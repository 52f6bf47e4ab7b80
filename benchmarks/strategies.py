"""Bytes of tensors on one rank, and the time of a step, for every way to lie on the ranks: one model, one table.

    python benchmarks/strategies.py            # two processes; results/strategies.json
    python benchmarks/strategies.py --quick    # fewer steps, writes no file

`strategies_rank.py` runs the cases; this starts it, checks that all cases take the same step, and prints the table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from strategies_cases import CASES, Case

RANK = Path(__file__).with_name("strategies_rank.py")
RESULT = Path(__file__).parent / "results" / "strategies.json"
MIB = 2**20
COLUMNS = ("loading", "parameters", "optimizer", "gradients", "activations", "peak")


def main() -> int:
    """Run, compare, print, write; 1 where a case takes another step than the first one."""
    given = _arguments()
    chosen = [case for case in CASES if given.device == "cpu" or case.on_gpu]
    if given.cases:
        chosen = [case for case in chosen if any(word in case.name for word in given.cases)]
    with tempfile.TemporaryDirectory() as folder:
        found = {name: row for size in (1, 2) for name, row in _launch(size, chosen, given, Path(folder)).items()}
    rows = [found[case.name] | {"name": case.name, "ranks": case.ranks} for case in chosen if case.name in found]
    wrong = [row["name"] for row, case in zip(rows, chosen, strict=True) if not _same_step(row, rows[0], case)]
    _print(rows)
    if not given.quick and not given.cases and given.device == "cpu":
        RESULT.write_text(json.dumps({"machine": _machine(given), "cases": rows}, indent=1) + "\n")
    for name in wrong:
        print(f"another step than the first: {name}")
    kept = [text for text in _claims({row["name"]: row for row in rows}, given.device) if text]
    print("\n".join(kept))
    return 1 if wrong or any(text.startswith("NOT") for text in kept) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cases", nargs="*", default=[], help="those whose name has one of the words")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: the cases of one rank")
    given = parser.parse_args()
    given.steps = 2 if given.quick else given.steps
    return given


def _launch(world_size: int, chosen: list[Case], given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All cases of so many ranks in one start of the processes: the largest figure over the ranks."""
    names = [case.name for case in chosen if case.ranks == world_size]
    if not names:
        return {}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu" if given.device == "cpu" else "cuda"}
    if world_size > 1:
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": f"{world_size}"}
    words = [sys.executable, str(RANK), str(folder), given.device, str(given.steps), *names]
    processes = [
        subprocess.Popen(words, env=shared | ({"RANK": f"{rank}"} if world_size > 1 else {}))
        for rank in range(world_size)
    ]
    codes = [process.wait() for process in processes]
    assert codes == [0] * world_size, f"a rank failed: {codes}"
    told = [json.loads((folder / f"{world_size}_{rank}.json").read_text()) for rank in range(world_size)]
    return {name: {key: max(rank[name][key] for rank in told) for key in told[0][name]} for name in names}


def _same_step(row: dict[str, Any], first: dict[str, Any], case: Case) -> bool:
    return abs(row["norm"] - first["norm"]) <= case.tolerance * first["norm"]


def _print(rows: list[dict[str, Any]]) -> None:
    print("\nMiB of tensors on one rank (the largest), the median step in ms, and the norm of the gradient")
    print(f"{'':<34} {'ranks':>5} " + " ".join(f"{name:>11}" for name in COLUMNS) + f" {'ms':>8} {'norm':>9}")
    for row in rows:
        figures = " ".join(f"{row[name] / MIB:11.1f}" for name in COLUMNS)
        print(f"{row['name']:<34} {row['ranks']:>5} {figures} {row['milliseconds']:8.0f} {row['norm']:9.4f}")
    print()


def _claims(rows: dict[str, dict[str, Any]], device: str) -> list[str]:
    """What the guides say of each flag, looked at in the table."""
    told = []
    for flag, base, column, most in CLAIMS + (ON_A_GPU if device == "cuda" else ()):
        if flag in rows and base in rows:
            share = rows[flag][column] / rows[base][column]
            word = "" if share <= most else "NOT "
            told.append(f"{word}{flag}: {column} {share:.2f} of {base} (at most {most:g} is said)")
    return told


CLAIMS = (
    ("FSDP", "replicas", "parameters", 0.55),
    ("FSDP", "replicas", "gradients", 0.60),
    ("FSDP", "replicas", "optimizer", 0.55),
    ("FSDP --meta_init", "FSDP", "loading", 0.85),
    ("ZeRO 1", "replicas", "optimizer", 0.80),
    ("ZeRO 2", "ZeRO 1", "gradients", 0.75),
    ("ZeRO 3", "ZeRO 2", "parameters", 0.60),
    ("FSDP --sp_size 2", "FSDP", "activations", 0.70),
    ("--bf16", "one process", "activations", 0.75),
    ("--bf16", "one process", "parameters", 0.51),
    ("--use_mp_opt", "one process", "activations", 0.75),
    ("--fp16", "one process", "activations", 0.75),
    ("--gradient_checkpointing", "one process", "activations", 0.40),
    ("--gradient_checkpointing selective", "one process", "activations", 0.90),
    ("the low-memory recipe", "replicas", "peak", 0.50),
)
"""(case, beside, column, share that is left at most). ZeRO 1 has a float32 copy of its share beside the moments."""
ON_A_GPU = (
    ("--adam_offload", "one process", "optimizer", 0.05),
    ("FSDP --fsdp_cpu_offload", "one process", "parameters", 0.05),
)
"""What moves to the host's memory, which on a CPU is the same memory."""


def _machine(given: argparse.Namespace) -> dict[str, Any]:
    import torch

    return {"torch": torch.__version__, "processor": platform.processor() or platform.machine(), "steps": given.steps}


if __name__ == "__main__":
    sys.exit(main())
