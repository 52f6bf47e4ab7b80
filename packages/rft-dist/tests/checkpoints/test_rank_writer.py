"""Saves of real gloo ranks, at once and beside training; one launch with two ranks and one with four."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rft_dist.checkpoints.reader import newest_verified, open_verified

PROGRAM = Path(__file__).with_name("ranks_save.py")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_save_together_and_load_other_blocks(tmp_path: Path, num_ranks: int) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": f"{num_ranks}"}
    shared |= {"NCCL_TIMEOUT": "120", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    folder = tmp_path / "checkpoints"
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder)],
            env={**os.environ, **shared, "RANK": f"{rank}"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * num_ranks, "\n".join(errors)
    for rank in range(num_ranks):
        found = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        assert (found["now"], found["last"], found["steps"]) == (1, 3, [2, 3])
        assert found["sums"] == [float(sum(range(num_ranks)))]
        assert (found["loaded"], found["right"]) == (1, True)
        assert found["error"].startswith("component 'ledger' of step 4 cannot be written")
    checkpoint = newest_verified(folder).checkpoint
    assert checkpoint is not None
    want = torch.arange(60, dtype=torch.float32).view(10, 6) + 3000
    assert torch.equal(checkpoint.tensors("optimizer")["w"], want)
    files = sorted(open_verified(folder / "step_000003").model_directory.glob("*.safetensors"))
    weights = {name: tensor.tolist() for file in files for name, tensor in load_file(file).items()}
    assert weights == {f"w{rank}": [float(rank)] * 2 for rank in range(num_ranks)}
    index = json.loads((checkpoint.model_directory / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["w1"] == f"model-00002-of-{num_ranks:05d}.safetensors"
