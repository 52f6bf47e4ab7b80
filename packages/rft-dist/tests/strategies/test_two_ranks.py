"""Two processes over gloo: their sums, their bytes, and an update equal to that of one process.

One launch runs every case of `two_ranks.py`; the tests read what the two ranks wrote.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from rft_dist.collectives import SingleProcess

PROGRAM = Path(__file__).with_name("two_ranks.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both ranks wrote their results."""
    out = tmp_path_factory.mktemp("two_ranks")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": "2", "NCCL_TIMEOUT": "120"}
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(out)],
            env={**os.environ, **shared, **threads, "RANK": f"{rank}"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    return out


@pytest.fixture
def ranks(folder: Path) -> list[dict]:
    """The results of rank 0 and rank 1."""
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """The rank's program as a module, for its model and data."""
    spec = importlib.util.spec_from_file_location("two_ranks", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sums_and_maxima_are_over_both_ranks_and_leave_the_input_alone(ranks: list[dict]) -> None:
    for rank, found in enumerate(entry["exchanges"] for entry in ranks):
        assert found["rank"] == [rank, 2]
        assert found["sum"] == [[3.0, -4.0], [1.0, 10.0]]
        assert found["sum_of_transposed"] == [[3.0, 1.0], [-4.0, 10.0]]
        assert found["max"] == [[2.0, -2.0], [0.5, 10.0]]
        assert found["input_after"] == [[1.0 + rank, -2.0], [0.5, 10.0 * rank]]
        assert found["counts"] == [2**41 + 1]
        assert found["broadcast"] == [7.0, 7.0, 7.0]


def test_a_sum_of_floats_has_the_same_bits_on_both_ranks_and_every_time(ranks: list[dict]) -> None:
    hashes = {entry for found in ranks for entry in found["exchanges"]["sum_hashes"]}
    assert len(hashes) == 1


def test_bytes_of_unequal_length_arrive_in_rank_order(ranks: list[dict]) -> None:
    for found in (entry["bytes"] for entry in ranks):
        assert found["ragged"] == ["", bytes(range(200)).hex()]
        assert found["empty"] == ["", ""]
        assert bytes.fromhex(found["broadcast"]) == b"from zero"
        assert found["broadcast_empty"] == ""


def test_two_ranks_have_the_gradient_of_one_whatever_their_micro_batches(
    folder: Path, ranks: list[dict], program: ModuleType
) -> None:
    model = program.make_model()
    optimizer = program.make_optimizer(model, SingleProcess())
    both = [load_file(folder / f"gradients_{rank}.safetensors") for rank in range(2)]
    for step in program.MICRO_BATCHES:
        optimizer.backward(model(program.inputs_of(step)).square().sum() / 10)
        norm = optimizer.step(program.LEARNING_RATE).gradient_norm
        for rank in range(2):
            assert ranks[rank]["training"]["norms"][step] == pytest.approx(norm, rel=1e-5)
        for name, want in optimizer.state_tensors().items():
            if not name.startswith("exp_avg/"):
                continue
            assert torch.equal(both[0][f"{step}/{name}"], both[1][f"{step}/{name}"])
            difference = (both[0][f"{step}/{name}"] - want).norm() / want.norm()
            # From the second step on, the weights already differ by what AdamW made of rounding.
            assert difference < (1e-6 if step == 0 else 1e-5), f"step {step}, {name}: {difference}"


def test_both_ranks_hold_the_same_weights_whatever_the_size_of_the_buckets(ranks: list[dict]) -> None:
    hashes = {found["training"][key] for found in ranks for key in ("hash", "hash_small_buckets")}
    assert len(hashes) == 1


def test_a_gradient_that_is_not_finite_on_one_rank_is_refused_on_both(ranks: list[dict]) -> None:
    for found in (entry["not_finite"] for entry in ranks):
        assert not found["refused_applied"]
        assert found["unchanged"]
        assert found["next_applied"]
    assert ranks[0]["not_finite"]["hash"] == ranks[1]["not_finite"]["hash"]


def test_ranks_that_start_from_different_weights_are_refused_until_they_share_those_of_rank_0(
    ranks: list[dict], program: ModuleType
) -> None:
    want = program.weights_hash(program.make_model(seed=0).named_parameters())
    for found in (entry["different_weights"] for entry in ranks):
        assert found["error"].startswith("weights of rank 1 have SHA-256")
        assert found["hash"] == want


def test_a_rank_that_left_is_an_error_that_names_the_collective(ranks: list[dict]) -> None:
    error = ranks[0]["peer_leaves"]["error"]
    assert "sum [2, 3] float32 at strategies/two_ranks.py:" in error
    assert error.endswith("(case_peer_leaves) did not finish")
