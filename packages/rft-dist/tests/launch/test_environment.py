"""Which rank a process takes itself for."""

from __future__ import annotations

import os

import pytest

from rft_core.errors import PreflightError
from rft_dist.launch.environment import (
    REPORTED,
    environment_report,
    ranks_from_environment,
    requested_backend,
    start_seconds,
    take_next_port,
    timeout_seconds,
)

BY_HAND = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "RANK": "5", "WORLD_SIZE": "8"}
BY_HAND_AS_REPORTED = ["MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"]
TORCHRUN = {**BY_HAND, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}


def test_nothing_set_is_a_single_process() -> None:
    info = ranks_from_environment({"PATH": "/bin"})
    assert (info.rank, info.world_size, info.local_rank, info.node_rank) == (0, 1, 0, 0)
    assert set(info.origins.values()) == {"default"}


def test_variables_of_torchrun_are_taken_with_their_origin() -> None:
    info = ranks_from_environment(TORCHRUN)
    assert (info.rank, info.world_size, info.local_rank, info.node_rank) == (5, 8, 1, 1)
    assert (info.master_addr, info.master_port) == ("10.0.0.1", 29500)
    assert info.origins["rank"] == "RANK (torchrun)"
    assert info.origins["local_rank"] == "LOCAL_RANK (torchrun)"


@pytest.mark.parametrize(
    ("extra", "devices", "local_rank", "origin"),
    [
        ({"LOCAL_RANK": "2"}, 4, 2, "LOCAL_RANK (the environment)"),
        ({"LOCAL_WORLD_SIZE": "4"}, 8, 1, "RANK modulo LOCAL_WORLD_SIZE"),
        ({}, 2, 1, "RANK modulo 2 local devices"),
        ({}, 0, 5, "RANK"),
    ],
)
def test_four_variables_by_hand_are_enough(extra: dict, devices: int, local_rank: int, origin: str) -> None:
    info = ranks_from_environment({**BY_HAND, **extra}, num_local_devices=devices)
    assert (info.rank, info.world_size, info.local_rank) == (5, 8, local_rank)
    assert info.origins["local_rank"] == origin
    assert info.origins["rank"] == "RANK (the environment)"


@pytest.mark.parametrize("missing", list(BY_HAND))
def test_a_partial_set_names_what_is_set_and_what_is_missing(missing: str) -> None:
    rest = {name: value for name, value in BY_HAND.items() if name != missing}
    with pytest.raises(PreflightError) as caught:
        ranks_from_environment(rest)
    what = caught.value.problem.what
    assert f"{missing} missing" in what
    assert all(f"{name}={value}" in what for name, value in rest.items())
    assert caught.value.problem.do.startswith(f"export {missing}=")


def test_a_local_rank_alone_is_a_partial_set() -> None:
    with pytest.raises(
        PreflightError, match="LOCAL_RANK=0 set, but MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE"
    ) as caught:
        ranks_from_environment({"LOCAL_RANK": "0"})
    assert caught.value.problem.code == "launch.partial_environment"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "8"),
        ("RANK", "-1"),
        ("RANK", "one"),
        ("RANK", "1.0"),
        ("RANK", "--1"),
        ("RANK", "\u0661"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "5"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
        ("LOCAL_RANK", "x"),
        ("NODE_RANK", "x"),
    ],
)
def test_a_value_outside_its_range_is_refused_with_the_value(name: str, value: str) -> None:
    with pytest.raises(PreflightError) as caught:
        ranks_from_environment({**BY_HAND, name: value})
    assert name in caught.value.problem.what
    assert value in caught.value.problem.what


@pytest.mark.parametrize(("text", "seconds"), [("", 600.0), ("1800", 1800.0), ("0.5", 0.5)])
def test_the_timeout_is_that_of_nccl_timeout_in_seconds(text: str, seconds: float) -> None:
    assert timeout_seconds({"NCCL_TIMEOUT": text}) == seconds


@pytest.mark.parametrize("text", ["0", "-3", "nan", "inf", "ten", "1e9", "604801"])
def test_a_timeout_that_is_no_wait_is_refused(text: str) -> None:
    with pytest.raises(PreflightError, match="NCCL_TIMEOUT") as caught:
        timeout_seconds({"NCCL_TIMEOUT": text})
    assert caught.value.problem.code == "launch.bad_value"


def test_a_backend_that_does_not_exist_is_refused() -> None:
    assert requested_backend({}) is None
    assert requested_backend({"NCCL_BACKEND": "gloo"}) == "gloo"
    with pytest.raises(PreflightError, match="NCCL_BACKEND = 'mpi'") as caught:
        requested_backend({"NCCL_BACKEND": "mpi"})
    assert caught.value.problem.code == "launch.bad_value"


def test_every_variable_that_is_set_is_reported_once_with_who_set_it() -> None:
    everything = {**dict.fromkeys(REPORTED, "1"), "NCCL_BACKEND": "nccl", "TORCHELASTIC_RUN_ID": "x"}
    rows = environment_report(everything)
    assert [name for name, _, _ in rows] == list(REPORTED)
    by_name = {name: effect for name, _, effect in rows}
    assert by_name["RANK"].endswith("set by torchrun")
    assert by_name["SLURM_NODEID"].endswith("set by SLURM")
    assert by_name["NCCL_DEBUG"].endswith("set by the environment")
    assert environment_report({"HOME": "/root"}) == []


def test_variables_of_nccl_are_reported_as_without_effect_under_gloo() -> None:
    values = {"NCCL_BACKEND": "gloo", "NCCL_IB_DISABLE": "1", "NCCL_TIMEOUT": "60"}
    effects = {name: effect for name, _, effect in environment_report(values)}
    assert effects["NCCL_IB_DISABLE"].startswith("no effect: the collectives run over gloo")
    assert not effects["NCCL_TIMEOUT"].startswith("no effect")
    (row,) = environment_report({"NCCL_DEBUG": "INFO"}, backend="gloo")
    assert row[2].startswith("no effect")
    (row,) = environment_report({"NCCL_DEBUG": "INFO"}, backend="nccl")
    assert not row[2].startswith("no effect")


OF_THE_TRANSPORT = (
    *("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_TIMEOUT"),
    *("NCCL_NET", "NCCL_NET_GDR_LEVEL", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE"),
    *("NCCL_CROSS_NIC", "TORCH_NCCL_BLOCKING_WAIT", "NCCL_A_SETTING_OF_A_LATER_VERSION"),
)


@pytest.mark.parametrize("name", OF_THE_TRANSPORT)
def test_whatever_is_set_of_the_transport_is_reported_with_its_value_and_effect(name: str) -> None:
    [(reported, value, effect)] = environment_report({name: "1", "NCCL_EMPTY": "", "HOME": "/root"})
    assert (reported, value) == (name, "1")
    assert effect.endswith("; set by the environment")
    assert ("a setting that the library itself reads" in effect) == (name == "NCCL_A_SETTING_OF_A_LATER_VERSION")
    [(_, _, under_gloo)] = environment_report({name: "1"}, backend="gloo")
    assert (
        under_gloo
        == f"no effect: the collectives run over gloo ({effect.partition('; set')[0]}); set by the environment"
    )


def test_every_field_has_the_origin_of_its_own_variable() -> None:
    required = {name.lower(): f"{name} (the environment)" for name in BY_HAND}
    for extra, local_rank, node_rank in (
        (
            {"LOCAL_RANK": "1", "NODE_RANK": "2"},
            (1, "LOCAL_RANK (the environment)"),
            (2, "NODE_RANK (the environment)"),
        ),
        ({"SLURM_NODEID": "3"}, (5, "RANK"), (3, "SLURM_NODEID (SLURM)")),
        ({"GROUP_RANK": "4", "NODE_RANK": "2"}, (5, "RANK"), (4, "GROUP_RANK (torchrun)")),
        ({"LOCAL_WORLD_SIZE": "0"}, (0, "RANK modulo LOCAL_WORLD_SIZE"), (0, "default")),
    ):
        info = ranks_from_environment({**BY_HAND, **extra})
        assert (info.local_rank, info.origins["local_rank"]) == local_rank
        assert (info.node_rank, info.origins["node_rank"]) == node_rank
        assert {name: info.origins[name] for name in required} == required
    by_command = ranks_from_environment({**BY_HAND, "RFT_NPROC": "8"})
    assert by_command.origins["rank"] == "RANK (--nproc)"


def test_ports_and_ranks_at_the_ends_of_their_ranges_are_allowed() -> None:
    for port in ("1", "65535", " 7 "):
        assert ranks_from_environment({**BY_HAND, "MASTER_PORT": port}).master_port == int(port)
    for rank, world_size in ((0, 1), (7, 8), (0, 8)):
        info = ranks_from_environment({**BY_HAND, "RANK": f"{rank}", "WORLD_SIZE": f"{world_size}"})
        assert (info.rank, info.world_size) == (rank, world_size)


def test_the_process_s_own_environment_is_read_where_no_other_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    # every variable of these libraries is reported, also one that an earlier test of this process left behind
    left = [name for name in os.environ if name.startswith(("NCCL_", "TORCH_NCCL_", "GLOO_"))]
    for name in {*REPORTED, *left}:
        monkeypatch.delenv(name, raising=False)
    for name, value in {**TORCHRUN, "NCCL_BACKEND": "gloo", "NCCL_TIMEOUT": "604800"}.items():
        monkeypatch.setenv(name, value)
    assert ranks_from_environment() == ranks_from_environment(TORCHRUN)
    assert (requested_backend(), timeout_seconds(), start_seconds()) == ("gloo", 604800.0, 604800.0)
    assert [name for name, _, _ in environment_report()] == [*BY_HAND_AS_REPORTED, "NCCL_TIMEOUT", "NCCL_BACKEND"]
    monkeypatch.setenv("RFT_START_TIMEOUT", "3")
    assert (timeout_seconds(), start_seconds()) == (604800.0, 3.0)


def test_the_next_meeting_is_at_the_next_port_that_is_held() -> None:
    values = {"MASTER_PORT": "1", "RFT_LATER_PORTS": "2,3"}
    seen = [values["MASTER_PORT"]]
    for _ in range(3):
        take_next_port(values)
        seen.append(values["MASTER_PORT"])
    assert seen == ["1", "2", "3", "3"]
    alone: dict[str, str] = {}
    take_next_port(alone)
    assert alone == {}
