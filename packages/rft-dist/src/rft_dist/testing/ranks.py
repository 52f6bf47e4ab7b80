"""Ranks for tests: a program as so many processes of this machine that meet through gloo. No torch is imported here."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_ranks(
    program: Path, world_size: int, *arguments: object, environment: Mapping[str, str] | None = None, seconds: int = 300
) -> str:
    """Run `program ARGUMENTS...` once a rank and give what they printed, outputs and errors, in the order of the ranks.

    With one rank no variable of a launch is set. A rank that ends badly is an AssertionError with the end of what all
    of them printed; one that does not end is killed with the others.
    """
    common = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    if world_size > 1:
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(world_size)}
        # ranks that miss another end by themselves, before the whole test is cut off
        common.setdefault("NCCL_TIMEOUT", "120")
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), *map(str, arguments)],
            env=common | ({"RANK": str(rank)} if world_size > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        printed = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    output = "\n".join(f"rank {rank}:\n{text[-3000:]}" for rank, pair in enumerate(printed) for text in pair if text)
    assert [process.returncode for process in processes] == [0] * world_size, output
    return "\n".join(text for pair in printed for text in pair).strip()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
