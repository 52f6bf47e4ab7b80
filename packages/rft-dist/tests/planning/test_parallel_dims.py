"""Nodes, GPUs and ranks: what follows from what, and 25 contradictions, each with its numbers and origins."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from rft_core.errors import PreflightError
from rft_dist.launch.environment import ranks_from_environment
from rft_dist.planning.parallel_dims import (
    BatchShare,
    ParallelDims,
    RequestedDims,
    SourcedNumber,
    layouts,
    resolve_grid,
)
from rft_dist.preflight.process_checks import check_start

NAMES = {"ranks": "--world_size", "nodes": "recipe.yaml:3", "per_node": "GPUS_PER_NODE (the environment)"}
NAMES |= {"devices": "CUDA devices that torch sees", "sp_size": "--sp_size", "tp_size": "--tp_size"}
SHOWN = {"per_node": "GPUS_PER_NODE of the environment"}
"""As a message shows the origins in brackets, where it is not as they are."""
SHARE = BatchShare("train_batch_size", 128, 8)


def wanted(**numbers: int) -> RequestedDims:
    given: dict[str, Any] = {name: SourcedNumber(value, NAMES[name]) for name, value in numbers.items()}
    return RequestedDims(share=SHARE, launcher="plan", **given)


@pytest.mark.parametrize(
    ("numbers", "nodes", "per_node"),
    [
        ({}, 1, 1),
        ({"ranks": 16, "nodes": 2}, 2, 8),
        ({"ranks": 16, "per_node": 8}, 2, 8),
        ({"nodes": 2, "per_node": 8}, 2, 8),
        ({"ranks": 16, "nodes": 2, "per_node": 8}, 2, 8),
        ({"ranks": 16, "devices": 8}, 2, 8),
        ({"ranks": 4, "devices": 8}, 1, 4),
        ({"ranks": 6}, 1, 6),
        ({"per_node": 4}, 1, 4),
        ({"nodes": 3}, 3, 1),
    ],
)
def test_two_numbers_give_the_third(numbers: dict[str, int], nodes: int, per_node: int) -> None:
    grid = resolve_grid(wanted(**numbers))
    assert (grid.num_nodes, grid.ranks_per_node, grid.world_size) == (nodes, per_node, nodes * per_node)


CONTRADICTIONS: list[dict[str, int]] = [
    {"ranks": 16, "nodes": 3},
    {"ranks": 7, "nodes": 2},
    {"ranks": 1, "nodes": 2},
    {"ranks": 16, "nodes": 2, "per_node": 4},
    {"ranks": 16, "nodes": 4, "per_node": 8},
    {"ranks": 8, "nodes": 2, "per_node": 8},
    {"ranks": 16, "nodes": 1, "per_node": 8},
    {"ranks": 15, "nodes": 2, "per_node": 8},
    {"ranks": 12, "per_node": 8},
    {"ranks": 4, "per_node": 8},
    {"ranks": 9, "per_node": 4},
    {"ranks": 12, "devices": 8},
    {"ranks": 16, "nodes": 1, "devices": 8},
    {"ranks": 32, "nodes": 2, "devices": 8},
    {"nodes": 2, "per_node": 8, "devices": 4},
    {"per_node": 2, "devices": 1},
    {"ranks": 16, "nodes": 2, "per_node": 8, "devices": 4},
    {"ranks": 24, "nodes": 3, "per_node": 8, "devices": 6},
    {"ranks": 0, "nodes": 2},
    {"ranks": 16, "nodes": 0},
    {"ranks": 16, "per_node": 0},
    {"ranks": 16, "nodes": 2, "sp_size": 3},
    {"ranks": 16, "nodes": 2, "tp_size": 5},
    {"ranks": 16, "nodes": 4, "tp_size": 8},
    {"ranks": 8, "nodes": 2, "sp_size": 4, "tp_size": 4},
]


@pytest.mark.parametrize("numbers", CONTRADICTIONS, ids=str)
def test_a_contradiction_names_every_number_and_its_origin_and_offers_what_can_be_run(numbers: dict[str, int]) -> None:
    with pytest.raises(PreflightError) as caught:
        resolve_grid(wanted(**numbers))
    problem = caught.value.problem
    for name, value in numbers.items():
        assert f"{value} ({SHOWN.get(name, NAMES[name])})" in problem.what
    for name in ("ranks", "nodes", "GPUs a node"):
        assert f"{name} = " in problem.what
    assert "))" not in problem.what
    assert not re.search(r"\b1 (ranks|GPUs|micro-batches|nodes)\b", str(problem))
    offered = re.findall(r"(\d+) x (\d+) = (\d+) ranks? \((\d+) of 128 samples", problem.why)
    assert offered
    group = numbers.get("sp_size", 1) * numbers.get("tp_size", 1)
    for nodes, per_node, ranks, samples in (map(int, row) for row in offered):
        again = {"ranks": ranks, "nodes": nodes, "per_node": per_node}
        again |= {name: numbers[name] for name in ("devices", "sp_size", "tp_size") if name in numbers}
        assert resolve_grid(wanted(**again)).world_size == ranks
        assert samples == -(-128 // (ranks // group))
    first = offered[0]
    assert problem.do.startswith(f"--nodes {first[0]} --world_size {first[2]}")
    if numbers.get("nodes"):
        assert int(first[0]) <= numbers["nodes"], "machines that nobody named may not be there"
    # the plan that is followed takes it: what is written elsewhere and not replaced stays
    flags = dict(zip(*[iter(problem.do.split())] * 2, strict=True))
    kept = {name: numbers[name] for name in ("per_node", "devices", "sp_size", "tp_size") if name in numbers}
    followed = {**kept, "nodes": int(flags["--nodes"]), "ranks": int(flags["--world_size"])}
    if "--gpus_per_node" in flags:
        followed["per_node"] = int(flags["--gpus_per_node"])
    assert resolve_grid(wanted(**followed)).world_size == int(first[2])


def test_the_remedy_of_a_plan_replaces_the_ranks_that_the_settings_give() -> None:
    requested = wanted(nodes=1, devices=4)
    with pytest.raises(PreflightError) as caught:
        resolve_grid(replace(requested, per_node=SourcedNumber(8, "nproc: recipe large.yaml:3")))
    assert caught.value.problem.do == "--nodes 1 --world_size 4 --nproc 4"


def test_there_are_25_contradictions() -> None:
    assert len({str(numbers) for numbers in CONTRADICTIONS}) == 25


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        *(({name: 0}, "launch.not_positive") for name in ("ranks", "nodes", "per_node", "sp_size", "tp_size")),
        ({"ranks": 16, "nodes": 3}, "launch.layout"),
        ({"ranks": 12, "per_node": 8}, "launch.layout"),
        ({"ranks": 16, "nodes": 2, "per_node": 4}, "launch.layout"),
        ({"ranks": 4, "per_node": 8}, "launch.layout"),
        ({"ranks": 4, "devices": 0}, "launch.layout"),
        ({"devices": 0}, "launch.too_few_devices"),
        ({"per_node": 2, "devices": 1}, "launch.too_few_devices"),
        ({"ranks": 16, "nodes": 2, "sp_size": 3}, "launch.parallel_sizes"),
        ({"ranks": 16, "nodes": 4, "tp_size": 8}, "launch.parallel_sizes"),
        ({"ranks": 6, "sp_size": 2, "tp_size": 2}, "launch.parallel_sizes"),
    ],
    ids=str,
)
def test_what_contradicts_what_is_told_apart_by_a_code(numbers: dict[str, int], code: str) -> None:
    with pytest.raises(PreflightError) as caught:
        resolve_grid(wanted(**numbers))
    assert caught.value.problem.code == code
    assert "of 128 samples each" in caught.value.problem.why, "what can be run is said with its share of the batch"


def test_a_refusal_is_at_the_places_of_its_numbers_each_once() -> None:
    def where(**numbers: SourcedNumber) -> str:
        with pytest.raises(PreflightError) as caught:
            resolve_grid(RequestedDims(**numbers))  # type: ignore[arg-type]
        return caught.value.problem.where

    flag, file = SourcedNumber(3, "--world_size"), SourcedNumber(2, "recipe.yaml:3")
    assert where(ranks=flag, nodes=file) == "--world_size, recipe.yaml:3"
    assert where(ranks=flag, nodes=SourcedNumber(2, "--world_size")) == "--world_size"
    assert where(sp_size=SourcedNumber(2, "default")) == "command line"


@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        ("plan", "--nodes 2 --world_size 16 --gpus_per_node 8"),
        ("torchrun", "torchrun --nnodes=2 --nproc_per_node=8 ..."),
        ("srun", "srun -N2 --ntasks-per-node=8 ..."),
        ("--nproc", "--nproc 8"),
        ("by hand", "export WORLD_SIZE=16 NUM_NODES=2 GPUS_PER_NODE=8"),
    ],
)
def test_the_nearest_grid_is_offered_as_the_launcher_takes_it(launcher: Any, command: str) -> None:
    numbers = {"ranks": SourcedNumber(16, "a"), "nodes": SourcedNumber(2, "b"), "per_node": SourcedNumber(4, "c")}
    with pytest.raises(PreflightError) as caught:
        resolve_grid(RequestedDims(**numbers, launcher=launcher))  # type: ignore[arg-type]
    assert caught.value.problem.do == command
    assert "2 x 8 = 16 ranks" in caught.value.problem.why
    assert "samples" not in caught.value.problem.why, "no batch was given"
    assert caught.value.problem.why.count(" ranks") == 1 + 3, "three grids at most"


def test_one_process_is_told_how_to_start_the_ranks_that_it_needs() -> None:
    alone = SourcedNumber(1, "default")
    with pytest.raises(PreflightError) as caught:
        resolve_grid(RequestedDims(ranks=alone, tp_size=SourcedNumber(2, "tp_size: command line")))
    assert (caught.value.problem.do, caught.value.problem.where) == ("--nproc 2", "tp_size: command line")


def test_no_grid_is_offered_where_a_tensor_group_fits_on_no_machine() -> None:
    with pytest.raises(PreflightError) as caught:
        resolve_grid(wanted(ranks=8, devices=4, tp_size=8))
    assert caught.value.problem.code == "launch.parallel_sizes"
    assert caught.value.problem.do == "make the parallel sizes smaller"
    assert layouts(wanted(ranks=8, devices=4, tp_size=8)) == []


def test_a_grid_knows_where_its_numbers_come_from_and_which_gpus_stay_idle() -> None:
    grid = resolve_grid(wanted(ranks=8, nodes=2, devices=4, sp_size=2, tp_size=4))
    assert (grid.sp_size, grid.tp_size, grid.dp_size) == (2, 4, 1)
    assert grid.origins == {name: NAMES[name] for name in ("ranks", "nodes", "devices")}
    assert grid.notes == ()
    assert len(resolve_grid(wanted(ranks=6, nodes=2, devices=4)).notes) == 1
    assert "1 of 4 GPUs" in resolve_grid(wanted(ranks=6, nodes=2, devices=4)).notes[0]
    assert resolve_grid(RequestedDims()).origins == {}


def test_the_nearest_grids_keep_the_number_of_ranks_first() -> None:
    assert layouts(wanted(ranks=16, nodes=3))[0] in ((2, 8), (4, 4), (1, 16))
    assert layouts(wanted(ranks=16, nodes=2, per_node=4))[0] == (2, 8)
    assert layouts(wanted(ranks=16, devices=4, sp_size=3))[0] in ((5, 3), (1, 3), (4, 3))


def test_no_machine_is_asked_for_that_the_numbers_do_not_name_where_fewer_processes_a_machine_fit() -> None:
    assert layouts(wanted(ranks=16, nodes=2, per_node=8, devices=4))[0] == (2, 4)
    assert layouts(wanted(ranks=16, nodes=2, per_node=4, devices=4))[0] == (2, 4)
    assert layouts(wanted(ranks=32, nodes=2, devices=8))[0] == (2, 8)
    assert layouts(wanted(ranks=16, per_node=8, devices=4))[0] == (2, 4), "16 ranks of 8 a node are on 2"
    assert layouts(wanted(ranks=16, nodes=2, tp_size=4, devices=2)) == [], "no machine holds a group, however many"


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({}, [(1, 1)]),
        (
            {"ranks": 7, "nodes": 5, "per_node": 2, "sp_size": 3},
            [(3, 2), (1, 6), (3, 3), (1, 9), (3, 1), (1, 3), (4, 3), (5, 3)],
        ),
        (
            {"ranks": 12, "nodes": 5, "tp_size": 3},
            [(4, 3), (1, 12), (5, 3), (1, 3), (4, 12), (5, 12), (6, 3), (6, 12)],
        ),
        ({"nodes": 5, "per_node": 8, "devices": 3}, [(5, 3), (5, 1), (1, 3), (1, 1)]),
        ({"ranks": 7, "nodes": 1, "devices": 1, "tp_size": 3}, []),
        ({"ranks": 4, "per_node": 8, "devices": 1, "sp_size": 2}, [(4, 1)]),
        ({"per_node": 6, "tp_size": 4}, [(1, 4), (1, 8)]),
        ({"ranks": 2, "per_node": 1}, [(1, 2), (2, 1), (1, 1)]),
    ],
)
def test_grids_are_offered_by_their_distance_in_ranks_and_then_in_machines(
    numbers: dict[str, int], expected: list[tuple[int, int]]
) -> None:
    found = layouts(wanted(**numbers))
    assert found == expected
    for nodes, per_node in found:
        again = {"ranks": nodes * per_node, "nodes": nodes, "per_node": per_node}
        given = {name: numbers[name] for name in ("devices", "sp_size", "tp_size") if name in numbers}
        assert resolve_grid(wanted(**again, **given)).world_size == nodes * per_node


def test_every_rank_has_a_place_of_its_own_and_tensor_groups_stay_on_a_node() -> None:
    grid = ParallelDims(2, 8, sp_size=2, tp_size=4)
    assert grid.dp_size == 2
    assert grid.coordinates(0) == (0, 0, 0)
    assert grid.coordinates(5) == (0, 1, 1)
    assert grid.coordinates(15) == (1, 1, 3)
    assert len({grid.coordinates(rank) for rank in range(16)}) == 16
    groups: dict[tuple[int, int], set[int]] = {}
    for rank in range(16):
        dp, sp, _ = grid.coordinates(rank)
        groups.setdefault((dp, sp), set()).add(rank // 8)
    assert all(len(nodes) == 1 for nodes in groups.values())


@pytest.mark.parametrize(
    ("size", "micro", "dp", "want"),
    [(128, 8, 16, (8, 1)), (128, 8, 5, (26, 4)), (4, 8, 16, (1, 1)), (130, 4, 2, (65, 17))],
)
def test_a_rank_has_its_share_of_a_batch_in_micro_batches(
    size: int, micro: int, dp: int, want: tuple[int, int]
) -> None:
    assert BatchShare("train_batch_size", size, micro).of(dp) == want


TORCHRUN = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}
TORCHRUN |= {"LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}


def start(values: dict[str, str], num_devices: int = 0, **more: Any) -> ParallelDims:
    ranks = ranks_from_environment(values, num_local_devices=num_devices)
    return check_start(ranks, values, num_devices=num_devices, interfaces={"lo", "eth0"}, **more)


def test_the_start_reads_the_grid_from_torchrun_and_compares_it_with_the_gpus() -> None:
    grid = start(TORCHRUN, 8)
    assert (grid.num_nodes, grid.ranks_per_node) == (2, 8)
    assert start(TORCHRUN, 12).notes == ("4 of 12 GPUs of a node stay idle (CUDA devices that torch sees)",)
    with pytest.raises(PreflightError) as caught:
        start(TORCHRUN, 4, share=SHARE)
    assert "16 (WORLD_SIZE of torchrun)" in caught.value.problem.what
    assert "2 (GROUP_WORLD_SIZE of torchrun)" in caught.value.problem.what
    assert "4 (CUDA devices that torch sees)" in caught.value.problem.what
    assert caught.value.problem.do == "torchrun --nnodes=2 --nproc_per_node=4 ..."


def test_ranks_may_share_a_gpu_over_gloo_and_one_bound_gpu_is_not_the_whole_machine() -> None:
    assert start(TORCHRUN, 1, shares_devices=True).world_size == 16
    assert start({**TORCHRUN, "CUDA_VISIBLE_DEVICES": "3"}, 1).world_size == 16


def test_a_wrong_number_of_gpus_a_node_is_found_at_the_start() -> None:
    by_hand = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "16"}
    assert start({**by_hand, "NUM_NODES": "2", "GPUS_PER_NODE": "8"}).num_nodes == 2
    with pytest.raises(PreflightError, match="2 x 4 = 8 ranks, not 16") as caught:
        start({**by_hand, "NUM_NODES": "2", "GPUS_PER_NODE": "4"})
    assert caught.value.problem.code == "launch.layout"
    assert caught.value.problem.do == "export WORLD_SIZE=16 NUM_NODES=2 GPUS_PER_NODE=8"


def test_the_start_refuses_groups_that_do_not_divide_the_ranks() -> None:
    assert start(TORCHRUN, 8, sp_size=SourcedNumber(4, "sp_size: command line")).dp_size == 4
    with pytest.raises(PreflightError, match=r"16 ranks.*sp_size 3 \(sp_size") as caught:
        start(TORCHRUN, 8, sp_size=SourcedNumber(3, "sp_size: command line"))
    assert caught.value.problem.code == "launch.parallel_sizes"


def test_one_process_ignores_what_a_profile_says_of_whole_jobs() -> None:
    assert start({"GPUS_PER_NODE": "8", "NUM_NODES": "4"}).world_size == 1


def test_the_grid_of_srun_is_that_of_its_step() -> None:
    values = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}
    values |= {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "a[1-2]", "SLURM_NODEID": "1"}
    grid = start({**values, "SLURM_LOCALID": "1"}, 1, shares_devices=True)
    assert (grid.num_nodes, grid.ranks_per_node) == (2, 2)
    with pytest.raises(PreflightError, match=r"2 ranks.*on 1 GPU:") as caught:
        start({**values, "SLURM_GPUS_ON_NODE": "1"}, 1)
    assert caught.value.problem.code == "launch.too_few_devices"
    assert caught.value.problem.do == "srun -N2 --ntasks-per-node=1 ..."
