"""Sets of variables that cannot all hold, and their neighbours that can."""

from __future__ import annotations

from typing import Any

import pytest

from rft_core.errors import PreflightError
from rft_dist.launch.environment import RankInfo, ranks_from_environment
from rft_dist.planning.parallel_dims import ParallelDims
from rft_dist.preflight.environment_variables import contradictions, refuse_contradictions

HERE = ("eth0", "ib0", "ib1", "lo")
BY_HAND = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "RANK": "3", "WORLD_SIZE": "4"}


def ranks(**values: str) -> RankInfo:
    return ranks_from_environment(BY_HAND | values)


def found(values: dict[str, str], nodes: int = 2, **more: str) -> list[tuple[tuple[str, ...], str]]:
    grid = ParallelDims(nodes, 4 // nodes)
    return [(names, do) for names, _, do in contradictions(values, ranks(**more), grid, HERE)]


def test_nothing_set_is_nothing_wrong() -> None:
    assert found({}) == []
    refuse_contradictions({}, ranks(), ParallelDims(2, 2), HERE)


def test_the_first_set_is_refused_with_the_values_of_its_variables() -> None:
    values = {"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5_0"}
    with pytest.raises(PreflightError) as caught:
        refuse_contradictions(values, ranks(), ParallelDims(2, 2), HERE)
    assert caught.value.problem.code == "launch.contradictory_environment"
    assert caught.value.problem.what == "NCCL_IB_DISABLE=1, NCCL_IB_HCA=mlx5_0"
    assert caught.value.problem.where == "environment of rank 3"


SLURM = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
SLURM |= {"SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "a[1-2]"}


@pytest.mark.parametrize(
    ("name", "by_slurm"),
    [
        ("RANK", "SLURM_PROCID"),
        ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"),
        ("LOCAL_RANK", "SLURM_LOCALID"),
        ("NODE_RANK", "SLURM_NODEID"),
    ],
)
def test_a_number_that_srun_gives_otherwise(name: str, by_slurm: str) -> None:
    assert found(SLURM | {name: "0"}) == [((name, by_slurm), f"unset {name}")]
    assert found(SLURM | {name: SLURM[by_slurm]}) == []
    assert found(SLURM | {name: ""}) == []
    for launcher in ("TORCHELASTIC_RUN_ID", "RFT_NPROC"):
        assert found(SLURM | {name: "0", launcher: "1"}) == []


@pytest.mark.parametrize(
    ("values", "local_rank", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "5"}, "0", [("LOCAL_WORLD_SIZE", "WORLD_SIZE")]),
        ({"LOCAL_WORLD_SIZE": "4"}, "3", []),
        ({"LOCAL_WORLD_SIZE": "2"}, "1", []),
        ({"LOCAL_WORLD_SIZE": "2"}, "2", [("LOCAL_RANK", "LOCAL_WORLD_SIZE")]),
        ({"GPUS_PER_NODE": "2", "LOCAL_WORLD_SIZE": "4"}, "0", [("GPUS_PER_NODE", "LOCAL_WORLD_SIZE")]),
        ({"GPUS_PER_NODE": "4", "LOCAL_WORLD_SIZE": "4"}, "0", []),
        ({"NUM_NODES": "3", "GROUP_WORLD_SIZE": "2"}, "0", [("NUM_NODES", "GROUP_WORLD_SIZE")]),
        ({"NUM_NODES": "3"}, "0", []),
        ({"LOCAL_WORLD_SIZE": "x"}, "0", []),
    ],
)
def test_numbers_of_a_machine(values: dict[str, str], local_rank: str, expected: list[Any]) -> None:
    assert [names for names, _ in found(values, LOCAL_RANK=local_rank)] == expected


@pytest.mark.parametrize(("nodes", "node_rank", "wrong"), [("2", "2", True), ("3", "2", False), ("1", "3", True)])
def test_a_node_beyond_the_last(nodes: str, node_rank: str, wrong: bool) -> None:
    expected = [(("NODE_RANK", "NUM_NODES"), f"export NUM_NODES={int(node_rank) + 1}")] if wrong else []
    assert found({"NUM_NODES": nodes}, NODE_RANK=node_rank) == expected


def test_one_process_alone_is_no_node_of_a_job() -> None:
    alone = ranks_from_environment({})
    values = {"NUM_NODES": "0", "MASTER_ADDR": "localhost"}
    assert list(contradictions(values, alone, ParallelDims(1, 1), HERE)) == []


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.1.2.3", "::1", "ip6-localhost"])
def test_several_machines_do_not_meet_at_an_address_that_each_has_for_itself(address: str) -> None:
    wrong = [(("MASTER_ADDR",), "export MASTER_ADDR=<address of the first node>")]
    assert found({}, MASTER_ADDR=address) == wrong
    assert found({}, nodes=1, MASTER_ADDR=address) == []
    assert found({"TORCHELASTIC_RUN_ID": "x"}, MASTER_ADDR=address) == []
    assert found({}, MASTER_ADDR="10.127.0.1") == []


@pytest.mark.parametrize("name", ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
def test_the_loopback_interface_reaches_no_other_machine(name: str) -> None:
    assert found({name: "lo"}) == [((name,), f"unset {name}")]
    assert found({name: "lo"}, nodes=1) == []
    assert found({name: "eth0"}) == []


@pytest.mark.parametrize(
    ("wanted", "wrong"),
    [
        ("eth", False),
        ("ib", False),
        ("=eth0", False),
        ("=eth", True),
        ("=ib0:1", False),
        ("eth0:1", False),
        ("wlan,eth", False),
        ("wlan", True),
        ("^docker", False),
        ("", False),
    ],
)
def test_interfaces_of_nccl_are_beginnings_of_names_or_whole_ones(wanted: str, wrong: bool) -> None:
    assert bool(found({"NCCL_SOCKET_IFNAME": wanted})) is wrong


def test_one_process_alone_needs_no_interface() -> None:
    absent = {"NCCL_SOCKET_IFNAME": "wlan", "GLOO_SOCKET_IFNAME": "wlan"}
    assert len(found(absent)) == 2
    assert list(contradictions(absent, ranks_from_environment({}), ParallelDims(1, 1), HERE)) == []


@pytest.mark.parametrize(("wanted", "wrong"), [("eth0", False), ("eth", True), ("eth0,wlan", True), ("eth0,", False)])
def test_interfaces_of_gloo_are_whole_names(wanted: str, wrong: bool) -> None:
    assert bool(found({"GLOO_SOCKET_IFNAME": wanted})) is wrong


@pytest.mark.parametrize(
    ("first", "second", "off"),
    [
        ("NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_IB_DISABLE"),
        ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE"),
        ("NCCL_NET_GDR_LEVEL", "NCCL_IB_DISABLE", "NCCL_IB_DISABLE"),
        ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT"),
    ],
)
def test_a_transport_is_not_switched_off_and_configured(first: str, second: str, off: str) -> None:
    assert found({first: "1", second: "1"}) == [((first, second), f"unset {off}")]
    assert found({first: "1"}) == []
    assert found({second: "1"}) == []
    assert found({first: "1", second: "1", off: "0"}) == []


def test_one_way_of_noticing_errors_may_be_switched_off() -> None:
    assert found({"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}) == []


@pytest.mark.parametrize("name", ["BLOCKING_WAIT", "ASYNC_ERROR_HANDLING", "AVOID_RECORD_STREAMS"])
def test_one_variable_under_two_names_has_one_value(name: str) -> None:
    old, new = f"NCCL_{name}", f"TORCH_NCCL_{name}"
    assert found({old: "0", new: "1"}) == [((old, new), f"unset {old}")]
    assert found({old: "1", new: "1"}) == []
    assert found({old: "1"}) == []
