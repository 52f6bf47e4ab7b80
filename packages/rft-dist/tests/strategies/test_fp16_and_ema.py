"""Two ranks in float16, and averages of weights: one launch runs every case of `half_ranks.py`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("sharded")
PROGRAM = Path(__file__).with_name("half_ranks.py")
WORLD_SIZE = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    out = tmp_path_factory.mktemp("half")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": f"{WORLD_SIZE}"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(out)],
            env={**os.environ, **shared, "NCCL_TIMEOUT": "120", "OMP_NUM_THREADS": "1", "RANK": f"{rank}"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * WORLD_SIZE, "\n".join(errors)
    return [json.loads((out / f"rank_{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


@pytest.mark.parametrize("strategy", ["replicated", "fsdp"])
def test_an_overflow_on_one_rank_skips_that_step_on_all_and_leaves_no_trace(results: list[dict], strategy: str) -> None:
    for found in results:
        skip = found[f"skip {strategy}"]
        assert skip["applied"] == [True, False, True, True]
        assert skip["scales"] == [2.0**16, 2.0**16, 2.0**15, 2.0**15]
        assert skip["equal"], "weights, moments and counts are those of a run in which it was not"


@pytest.mark.parametrize("strategy", ["replicated", "fsdp"])
def test_gradients_in_float16_are_those_of_float32_within_its_precision(results: list[dict], strategy: str) -> None:
    for found in results:
        near = found[f"near {strategy}"]
        assert near["half"] == pytest.approx(near["full"], rel=5e-3)
        assert near["half"] != near["full"]


def test_blocks_with_scale_and_average_go_on_to_the_bit(results: list[dict]) -> None:
    for rank, found in enumerate(results):
        assert found["resumed"] == {"told": True, "equal": True, "writes_scale": rank == 0}


def test_averages_in_blocks_are_those_of_replicas(results: list[dict]) -> None:
    for found in results:
        averages = dict(found["averages"])
        assert averages.pop("moved") > 1e-3, "the average is not the weight itself"
        assert set(averages) == {"fsdp", "zero 1", "zero 1 loaded", "zero 3", "zero 3 loaded"}
        assert max(averages.values()) < 1e-5, averages
