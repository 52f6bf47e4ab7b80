"""Who has which GPU: 20 placements, of which those that collide are refused with both claimants."""

import re
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft.process.placement import GpuPlacement, only_these, own_gpus, ranks_on_this_machine
from rft_core.errors import PreflightError

FITTING = [(1, 0, 1, 1), (2, 0, 1, 2), (1, 1, 1, 2), (1, 2, 1, 3), (1, 1, 4, 5), (2, 1, 1, 4)]
FITTING += [(2, 1, 2, 6), (2, 3, 1, 8), (4, 1, 1, 8), (1, 7, 1, 8), (3, 1, 1, 8), (2, 1, 3, 8)]
TOO_FEW = [(1, 1, 1, 1), (2, 1, 1, 2), (2, 1, 1, 3), (1, 1, 4, 4)]
TOO_FEW += [(4, 1, 1, 7), (2, 2, 2, 9), (8, 1, 1, 8), (1, 3, 2, 6)]


@pytest.mark.parametrize("numbers", FITTING)
def test_a_placement_that_fits_gives_every_gpu_to_one(numbers: tuple[int, int, int, int]) -> None:
    placement = GpuPlacement(*numbers)
    placement.require()
    own = [[rank] for rank in range(placement.ranks)]
    own += [
        list(placement.of_replica(rank, number))
        for rank in range(placement.ranks)
        for number in range(placement.replicas)
    ]
    assert sorted(chain.from_iterable(own)) == list(range(placement.wanted))
    assert placement.wanted <= placement.visible


@pytest.mark.parametrize("numbers", TOO_FEW)
def test_a_placement_that_collides_is_refused_with_who_claims_what(numbers: tuple[int, int, int, int]) -> None:
    placement = GpuPlacement(*numbers)
    with pytest.raises(PreflightError) as caught:
        placement.require()
    problem = caught.value.problem
    assert problem.code == "engine.replicas.devices"
    assert re.search(f"need {placement.wanted} GPUs, {placement.visible} (is|are) visible", problem.what)
    assert ": the ranks (--nproc or the launcher)" in problem.where
    assert re.search(r"(GPU \d+, which is|GPUs \d+ to \d+, which are) not there: replica", problem.where)
    assert not re.search(r"\b1 (ranks|engine replicas|GPUs)\b", problem.what)


def test_the_remedy_is_as_many_replicas_as_fit() -> None:
    for numbers, remedy in (((1, 3, 2, 6), "--engine_replicas 2"), ((2, 1, 1, 3), "--engine_replicas 1 --max_stal")):
        with pytest.raises(PreflightError) as caught:
            GpuPlacement(*numbers).require()
        assert caught.value.problem.do.startswith(remedy)


def test_positions_become_the_names_that_a_launcher_gave() -> None:
    assert only_these(range(1, 3), 4, {}) == {"CUDA_VISIBLE_DEVICES": "1,2"}
    assert only_these(range(1, 3), 4, {"CUDA_VISIBLE_DEVICES": "7, GPU-a, GPU-b, 2"}) == {
        "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"
    }


@pytest.mark.parametrize(
    ("device", "visible", "names"), [("cuda:1", 2, "1"), ("cuda:0", 2, "0"), ("cuda:0", 1, None), ("cpu", 2, None)]
)
def test_the_engine_of_a_rank_is_on_the_gpu_of_the_rank(
    device: str, visible: int, names: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    machine: Any = SimpleNamespace(device=device)
    assert own_gpus(machine) == ({} if names is None else {"CUDA_VISIBLE_DEVICES": names})


@pytest.mark.parametrize(("visible", "size"), [(2, 2), (4, 2), (4, 4), (8, 4)])
def test_parts_of_the_engines_of_all_ranks_are_spread_evenly_and_begin_on_their_own_gpu(
    visible: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    parts: list[str] = []
    for rank in range(visible):
        machine: Any = SimpleNamespace(device=f"cuda:{rank}")
        names = own_gpus(machine, size)["CUDA_VISIBLE_DEVICES"].split(",")
        assert names[0] == str(rank)
        assert len(set(names)) == size
        parts += names
    assert {parts.count(str(gpu)) for gpu in range(visible)} == {size}
    too_many: Any = SimpleNamespace(device="cuda:0")
    assert own_gpus(too_many, visible + 1) == {}


def test_without_a_launcher_all_ranks_are_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine: Any = SimpleNamespace(ranks=SimpleNamespace(world_size=4))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks_on_this_machine(machine) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert ranks_on_this_machine(machine) == 2
