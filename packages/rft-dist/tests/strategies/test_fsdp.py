"""Weights spread over ranks: the same steps as replicas of them, at a share of the memory.

One launch of two processes and one of four run every case of `sharded_ranks.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rft_dist.testing.ranks import run_ranks
from rft_dist.testing.thread_ranks import rank_program, run_in_threads

pytestmark = pytest.mark.xdist_group("sharded")
PROGRAM = Path(__file__).with_name("sharded_ranks.py")
EXACT = ("fsdp", "kept", "offload")


@dataclass(frozen=True)
class Found:
    folder: Path
    world_size: int

    def results(self) -> list[dict]:
        return [json.loads((self.folder / f"rank_{rank}.json").read_text()) for rank in range(self.world_size)]

    def weights(self, name: str, rank: int = 0) -> dict[str, Tensor]:
        return load_file(self.folder / f"{name}_{rank}.safetensors")


@pytest.fixture(scope="module", params=[2, 4, "threads"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What all ranks wrote: so many processes, or four threads of this one."""
    out = tmp_path_factory.mktemp("sharded")
    if request.param != "threads":
        run_ranks(PROGRAM, request.param, out)
        return Found(out, request.param)
    program = rank_program(PROGRAM)
    run_in_threads(4, lambda ranks: program.run_cases(ranks, out))
    return Found(out, 4)


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Largest relative L2 distance of two sets of tensors."""
    assert sorted(first) == sorted(second)
    return max(float((first[n] - second[n]).norm() / second[n].norm().clamp(min=1e-12)) for n in second)


def test_three_steps_are_those_of_replicas(found: Found) -> None:
    expected = found.weights("replicated")
    for name in (*EXACT, *(["hybrid"] if found.world_size == 4 else [])):
        assert distance(found.weights(name), expected) < 1e-4, name
        for result in found.results():
            assert result[name]["norms"] == pytest.approx(result["replicated"]["norms"], rel=1e-6)


def test_muon_takes_the_steps_of_replicas(found: Found) -> None:
    replicas, adamw = found.weights("muon_replicated"), found.weights("replicated")
    # sums of more than two ranks come in another order, and Muon rounds to bfloat16
    allowed = 1e-6 if found.world_size == 2 else 5e-3
    for name in ("muon", "muon_offload", *(["muon_hybrid"] if found.world_size == 4 else [])):
        assert distance(found.weights(name), replicas) < allowed, name
        for rank in range(1, found.world_size):
            assert distance(found.weights(name, rank), found.weights(name)) == 0
    assert all(
        float((replicas[name] - adamw[name]).norm()) > 0.01 for name in ("layers.0.0.weight", "layers.1.2.weight")
    )
    for result in found.results():
        assert result["muon resumed"]["equal"]


def test_every_rank_puts_together_the_same_weights(found: Found) -> None:
    for rank in range(1, found.world_size):
        for name in EXACT:
            assert distance(found.weights(name, rank), found.weights(name)) == 0


def test_each_rank_holds_its_share_of_weights_and_moments(found: Found) -> None:
    for result in found.results():
        assert result["fsdp"]["sharded"]
        assert result["fsdp"]["held"] <= result["fsdp"]["total"] / found.world_size * 1.35
        assert result["fsdp"]["moments"] <= result["fsdp"]["held"]
    assert sum(result["fsdp"]["held"] for result in found.results()) == found.results()[0]["fsdp"]["total"]


def test_blocks_lie_side_by_side_and_one_rank_writes_each(found: Found) -> None:
    results = [result["fsdp"] for result in found.results()]
    for name in results[0]["blocks"]:
        end = 0
        for result in results:
            start, shape = result["blocks"][name]
            if shape[0]:
                assert start[0] == end
                end += shape[0]
        assert end == len(found.weights("fsdp")[name])
        assert all(name in result["writes"] for result in results)
    if found.world_size == 4:
        hybrid = [result["hybrid"] for result in found.results()]
        assert [len(result["writes"]) > 0 for result in hybrid] == [True, True, False, False]
        assert hybrid[0]["blocks"] == hybrid[2]["blocks"] != hybrid[1]["blocks"]


def test_computing_in_bfloat16_keeps_weights_and_sums_in_float32(found: Found) -> None:
    exact, rounded = found.weights("fsdp"), found.weights("bfloat16")
    assert all(tensor.dtype == torch.float32 for tensor in rounded.values())
    assert 1e-6 < distance(rounded, exact) < 0.05


def test_a_step_after_loading_equals_the_uninterrupted_one_to_the_bit(found: Found) -> None:
    assert all(result["resumed"]["equal"] for result in found.results())


def test_what_is_not_finite_on_one_rank_is_refused_on_all(found: Found) -> None:
    for result in found.results():
        assert result["not_finite"] == {"refused": True, "unchanged": True, "large": True}


def test_groups_that_do_not_divide_the_ranks_are_refused_with_those_that_do(found: Found) -> None:
    divisors = {2: "1, 2", 4: "1, 2, 4"}[found.world_size]
    for result in found.results():
        assert f"allowed: {divisors}" in result["shard_size"]["why"]
        assert result["shard_size"]["do"] == "--shard_size 2"
