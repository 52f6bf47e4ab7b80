"""Matrices in parts over ranks that compute together: the steps of whole ones, at a share of the memory.

One launch of two processes (one group) and one of four (two groups of two) run every case of `tensor_ranks.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rft_dist.testing.ranks import run_ranks
from rft_dist.testing.thread_ranks import rank_program, run_in_threads

pytestmark = pytest.mark.xdist_group("tensor")
PROGRAM = Path(__file__).with_name("tensor_ranks.py")


@dataclass(frozen=True)
class Found:
    folder: Path
    world_size: int

    def results(self, name: str) -> list[Any]:
        return [json.loads((self.folder / f"rank_{rank}.json").read_text())[name] for rank in range(self.world_size)]

    def weights(self, name: str, rank: int = 0) -> dict[str, Tensor]:
        return load_file(self.folder / f"{name}_{rank}.safetensors")


@pytest.fixture(scope="module", params=[2, 4, "threads"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What all ranks wrote: so many processes, or four threads of this one."""
    out = tmp_path_factory.mktemp("tensor")
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


def test_three_steps_are_those_of_whole_matrices(found: Found) -> None:
    assert distance(found.weights("parts"), found.weights("whole")) < 1e-4
    for parts, whole in zip(found.results("parts"), found.results("whole"), strict=True):
        assert parts["norms"] == pytest.approx(whole["norms"], rel=1e-5)


def test_parts_in_blocks_take_the_steps_of_whole_matrices(found: Found) -> None:
    """On 2 ranks one block of each part; on 4 two, of 11 tokens' rows 3, 3, 3 and 2."""
    assert distance(found.weights("spread"), found.weights("whole")) < 1e-4
    for spread, whole in zip(found.results("spread"), found.results("whole"), strict=True):
        assert spread["norms"] == pytest.approx(whole["norms"], rel=1e-5)
        assert spread["held"] < 1.4 * spread["total"] / found.world_size
        assert spread["tied"]
    for rank in range(1, found.world_size):
        assert distance(found.weights("spread", rank), found.weights("spread")) == 0
    assert all(result["equal"] for result in found.results("spread_resumed"))


def test_blocks_of_parts_cover_the_state_once_and_are_that_of_parts(found: Found) -> None:
    weights = found.weights("spread")
    full_shards = {name: torch.full(list(tensor.shape), torch.nan) for name, tensor in weights.items()}
    for rank, spread in enumerate(found.results("spread")):
        blocks = load_file(found.folder / f"spread_shards_{rank}.safetensors")
        for number, (key, shape, start) in enumerate(spread["shards"]):
            kind, _, name = key.partition("/")
            if kind != "exp_avg":
                continue
            block = blocks[f"{number}"]
            assert shape == list(weights[name].shape)
            box = tuple(slice(first, first + size) for first, size in zip(start, block.shape, strict=True))
            assert bool(full_shards[name][box].isnan().all()), "given twice"
            full_shards[name][box] = block
    expected = load_file(found.folder / "whole_moments_0.safetensors")
    assert distance(full_shards, expected) < 1e-4


def test_narrow_weights_are_stepped_on_in_float32(found: Found) -> None:
    assert distance(found.weights("parts_narrow"), found.weights("whole_narrow")) < 2e-2
    for parts, whole in zip(found.results("parts_narrow"), found.results("whole_narrow"), strict=True):
        assert parts["norms"] == pytest.approx(whole["norms"], rel=2e-2)


def test_every_rank_has_the_same_weights(found: Found) -> None:
    for rank in range(1, found.world_size):
        assert distance(found.weights("parts", rank), found.weights("parts")) == 0


def test_a_rank_keeps_its_parts_and_nothing_more(found: Found) -> None:
    for parts in found.results("parts"):
        assert parts["held"] < 0.6 * parts["total"]
        assert parts["memory"] == parts["held"]
        assert parts["tied"]
        assert parts["blocks"]["layers.0.up.weight"][1] == [4, 6]
        assert parts["blocks"]["layers.0.down.weight"][1] == [6, 4]
        assert parts["blocks"]["layers.0.up.bias"][1] == [4]
        assert parts["blocks"]["layers.0.down.bias"][1] == [6]
    rows = [parts["blocks"]["embedding.weight"] for parts in found.results("parts")[:2]]
    assert rows == [[[0, 0], [6, 6]], [[6, 0], [5, 6]]]


def test_every_element_of_the_state_is_given_once(found: Found) -> None:
    results = found.results("parts")
    sizes: dict[str, int] = {}
    for parts in results:
        for name, _, shape in parts["shards"]:
            size = 1
            for length in shape:
                size *= length
            sizes[name] = sizes.get(name, 0) + size
    weights = found.weights("parts")
    for name, tensor in weights.items():
        assert sizes[f"exp_avg/{name}"] == sizes[f"exp_avg_sq/{name}"] == tensor.numel()
        assert sizes[f"step/{name}"] == 1
    assert all(not parts["writes"] for parts in results[2:])
    assert results[0]["copies"]["layers.0.up.weight"] == found.world_size // 2
    assert results[0]["copies"]["layers.0.gain"] == found.world_size


def test_a_step_after_loading_equals_the_uninterrupted_one_to_the_bit(found: Found) -> None:
    assert all(result["equal"] for result in found.results("resumed"))


def test_what_is_not_finite_in_one_group_is_refused_in_all(found: Found) -> None:
    assert found.results("not_finite") == [{"refused": True, "unchanged": True}] * found.world_size


def test_groups_that_do_not_divide_the_ranks_are_refused(found: Found) -> None:
    for refused in found.results("sizes"):
        assert refused["code"] == "tensor.tp_size"
        assert refused["do"] == "--tp_size 2"
