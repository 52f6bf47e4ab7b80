"""Numbers that a launcher requests, the checks of the start in their order, and who holds a port."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import PreflightError
from rft_dist.launch.environment import RankInfo, ranks_from_environment
from rft_dist.planning.parallel_dims import BatchShare, RequestedDims, SourcedNumber
from rft_dist.preflight import process_checks
from rft_dist.preflight.process_checks import (
    check_start,
    forgotten_srun,
    free_port,
    holder_of,
    interfaces_here,
    refuse_taken_port,
    requested_dims,
)

MEET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "0"}
TWO = {**MEET, "WORLD_SIZE": "2"}
TORCHRUN = {**MEET, "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
NPROC = {**MEET, "WORLD_SIZE": "2", "RFT_NPROC": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}
SRUN = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "a[1-2]"}
SRUN |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
TASKS = "SLURM_STEP_NUM_TASKS (SLURM)"
SEEN = "CUDA devices that torch sees"


def number(value: int, origin: str) -> SourcedNumber:
    return SourcedNumber(value, origin)


REQUESTS: dict[str, tuple[dict[str, str], int, RequestedDims]] = {
    "torchrun": (
        TORCHRUN,
        2,
        RequestedDims(
            ranks=number(4, "WORLD_SIZE (torchrun)"),
            nodes=number(2, "GROUP_WORLD_SIZE (torchrun)"),
            per_node=number(2, "LOCAL_WORLD_SIZE (torchrun)"),
            devices=number(2, SEEN),
            launcher="torchrun",
        ),
    ),
    "what a person writes comes before what torchrun counts": (
        {**TORCHRUN, "NUM_NODES": "1", "GPUS_PER_NODE": "4"},
        0,
        RequestedDims(
            ranks=number(4, "WORLD_SIZE (torchrun)"),
            nodes=number(1, "NUM_NODES (torchrun)"),
            per_node=number(4, "GPUS_PER_NODE (torchrun)"),
            launcher="torchrun",
        ),
    ),
    "torchrun with one process": (
        {**TORCHRUN, "WORLD_SIZE": "1", "NUM_NODES": "1", "GPUS_PER_NODE": "1"},
        8,
        RequestedDims(
            ranks=number(1, "WORLD_SIZE (torchrun)"),
            nodes=number(1, "NUM_NODES (torchrun)"),
            per_node=number(1, "GPUS_PER_NODE (torchrun)"),
            launcher="torchrun",
        ),
    ),
    "--nproc": (
        NPROC,
        0,
        RequestedDims(
            ranks=number(2, "WORLD_SIZE (--nproc)"),
            per_node=number(2, "LOCAL_WORLD_SIZE (--nproc)"),
            launcher="--nproc",
        ),
    ),
    "srun": (
        {**SRUN, "SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "3"},
        0,
        RequestedDims(
            ranks=number(4, TASKS),
            nodes=number(2, "SLURM_STEP_NUM_NODES (SLURM)"),
            per_node=number(2, "SLURM_STEP_TASKS_PER_NODE (SLURM)"),
            launcher="srun",
        ),
    ),
    "srun with nodes of unequal tasks on a machine of four GPUs": (
        {**SRUN, "SLURM_NNODES": "2", "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_GPUS_ON_NODE": "4"},
        1,
        RequestedDims(
            ranks=number(4, TASKS),
            nodes=number(2, "SLURM_NNODES (SLURM)"),
            devices=number(4, "SLURM_GPUS_ON_NODE (SLURM)"),
            launcher="srun",
        ),
    ),
    "by hand": (
        {**TWO, "NUM_NODES": "2", "GPUS_PER_NODE": "1"},
        8,
        RequestedDims(
            ranks=number(2, "WORLD_SIZE (the environment)"),
            nodes=number(2, "NUM_NODES (the environment)"),
            per_node=number(1, "GPUS_PER_NODE (the environment)"),
            devices=number(8, SEEN),
        ),
    ),
    "by hand, with the variables of launchers and a word for a number": (
        {**TWO, "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1", "NUM_NODES": "two", "SLURM_NNODES": "5"},
        1,
        RequestedDims(ranks=number(2, "WORLD_SIZE (the environment)"), devices=number(1, SEEN)),
    ),
    "one GPU bound to each task": (
        {**TWO, "CUDA_VISIBLE_DEVICES": "3"},
        1,
        RequestedDims(ranks=number(2, "WORLD_SIZE (the environment)")),
    ),
    "several GPUs of those that there are": (
        {**TWO, "CUDA_VISIBLE_DEVICES": "3,4"},
        2,
        RequestedDims(ranks=number(2, "WORLD_SIZE (the environment)"), devices=number(2, SEEN)),
    ),
    "one process with the profile of whole jobs": (
        {"NUM_NODES": "4", "GPUS_PER_NODE": "8"},
        8,
        RequestedDims(ranks=number(1, "default")),
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_the_numbers_of_a_launcher_come_with_their_origins(name: str) -> None:
    values, num_devices, expected = REQUESTS[name]
    assert requested_dims(ranks_from_environment(values), values, num_devices=num_devices) == expected


def test_a_batch_is_handed_on_and_no_gpu_is_counted_unless_told() -> None:
    share = BatchShare("train_batch_size", 8, 2)
    found = requested_dims(ranks_from_environment(TWO), TWO, share=share)
    assert (found.share, found.devices) == (share, None)


def numbers_of(values: dict[str, str], **options: Any) -> tuple[int, int, int, int]:
    grid = check_start(ranks_from_environment(values), values, interfaces={"lo"}, **options)
    return grid.num_nodes, grid.ranks_per_node, grid.sp_size, grid.tp_size


def test_the_grid_of_the_start_has_the_parallel_sizes_and_the_gpus_unless_ranks_share_them() -> None:
    four = {**TWO, "WORLD_SIZE": "4", "RANK": "1", "MASTER_ADDR": "10.0.0.1"}
    assert numbers_of(four) == (1, 4, 1, 1)
    assert numbers_of(four, num_devices=2) == (2, 2, 1, 1)
    assert numbers_of(four, num_devices=2, shares_devices=True) == (1, 4, 1, 1)
    assert numbers_of(four, sp_size=number(2, "--sp_size")) == (1, 4, 2, 1)
    assert numbers_of(four, tp_size=number(4, "--tp_size")) == (1, 4, 1, 4)
    with pytest.raises(PreflightError) as caught:
        numbers_of(four, tp_size=number(3, "--tp_size"), share=BatchShare("train_batch_size", 24, 1))
    assert "of 24 samples" in caught.value.problem.why


@pytest.mark.parametrize(
    ("world_size", "rank", "agent", "looks"),
    [
        ("2", "0", "", True),
        ("2", "0", "False", True),
        ("2", "0", "True", False),
        ("2", "1", "", False),
        ("1", "0", "", False),
    ],
)
def test_rank_0_looks_at_the_port_unless_it_is_alone_or_torchrun_holds_it(
    monkeypatch: pytest.MonkeyPatch, world_size: str, rank: str, agent: str, looks: bool
) -> None:
    looked: list[RankInfo] = []
    monkeypatch.setattr(process_checks, "refuse_taken_port", looked.append)
    values = {**MEET, "WORLD_SIZE": world_size, "RANK": rank, "TORCHELASTIC_USE_AGENT_STORE": agent}
    ranks = ranks_from_environment(values)
    check_start(ranks, values, interfaces={"lo"})
    assert looked == ([ranks] if looks else [])


def test_variables_and_interfaces_are_those_of_this_machine_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    together = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    first = ranks_from_environment(together)
    here = interfaces_here()
    assert here == {name for _, name in socket.if_nameindex()}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", min(here))
    check_start(first)
    check_start(first, {"NCCL_SOCKET_IFNAME": "ib7"}, interfaces={"ib7"})
    for variables, interfaces in (({"NCCL_SOCKET_IFNAME": "ib7"}, None), (None, {"ib7"})):
        with pytest.raises(PreflightError) as caught:
            check_start(first, variables, interfaces=interfaces)
        assert caught.value.problem.code == "launch.contradictory_environment"


def test_only_a_single_process_in_a_job_of_several_tasks_is_told_of_srun() -> None:
    job = {"SLURM_JOB_ID": "3", "SLURM_NTASKS": "16"}
    assert "16" in forgotten_srun(ranks_from_environment({}), job)
    assert not forgotten_srun(ranks_from_environment({}), {})
    assert not forgotten_srun(ranks_from_environment(TWO), job)


def test_a_port_where_only_connections_of_an_ended_run_close_is_free() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        port = listener.getsockname()[1]
        ranks = ranks_from_environment({**TWO, "MASTER_PORT": f"{port}"})
        with pytest.raises(PreflightError) as caught:
            refuse_taken_port(ranks)
        assert caught.value.problem.code == "launch.port_taken"
        with socket.create_connection(("127.0.0.1", port)) as client:
            listener.accept()[0].close()  # the side that closes first keeps the port for a minute
            assert client.recv(1) == b""
    refuse_taken_port(ranks)


def test_a_requeued_job_whose_port_another_holds_is_refused_with_one_that_is_free() -> None:
    with socket.create_server(("0.0.0.0", 0)) as holder:
        # a job keeps its number when it is requeued, and with that its port
        taken = ranks_from_environment({**SRUN, "MASTER_PORT": f"{holder.getsockname()[1]}"})
        with pytest.raises(PreflightError) as caught:
            refuse_taken_port(taken)
        problem = caught.value.problem
        assert f"port {taken.master_port} is held by pid {os.getpid()}" in problem.what
        free = problem.do.removeprefix("export MASTER_PORT=").removesuffix(" for every rank")
        refuse_taken_port(ranks_from_environment({**SRUN, "MASTER_PORT": free}))


def test_a_free_port_is_one_that_any_user_may_bind() -> None:
    port = free_port()
    assert 1023 < port < 65536
    with socket.socket() as probe:
        probe.bind(("", port))


ROW = "   0: 00000000:{port:04X} 0A00020F:{peer:04X} {state} 00000000:00000000 00:00000000 00000000  0  0 {inode}"


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A made-up /proc whose processes are given as number=(inodes, command)."""
    monkeypatch.setattr(process_checks, "Path", lambda *parts: Path(tmp_path, *(part.strip("/") for part in parts)))

    def make(table: str, **processes: tuple[list[int], bytes | None]) -> None:
        rows = [
            "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode",
            ROW.format(port=29500, peer=0, state="0A", inode=777),
            ROW.format(port=29500, peer=41, state="01", inode=888),
            ROW.format(port=29501, peer=29500, state="0A", inode=999),
        ]
        (tmp_path / "proc/net").mkdir(parents=True)
        (tmp_path / "proc/net" / table).write_text("\n".join(rows) + "\n")
        for name, (inodes, command) in processes.items():
            folder = tmp_path / "proc" / name.removeprefix("p")
            folder.mkdir()
            if command is not None:
                (folder / "cmdline").write_bytes(command)
                (folder / "fd").mkdir()
            for inode in inodes:
                os.symlink(f"socket:[{inode}]", folder / "fd" / f"{inode}")

    return make


@pytest.mark.parametrize("table", ["tcp", "tcp6"])
@pytest.mark.parametrize(
    ("command", "told"),
    [
        (b"python\0train.py\0", "pid 41 (python train.py)"),
        (b"x" * 200, f"pid 41 ({'x' * 80})"),
        (b"", "pid 41 (unknown program)"),
    ],
)
def test_the_holder_of_a_port_is_the_process_whose_socket_listens(
    proc: Callable[..., None], table: str, command: bytes, told: str
) -> None:
    proc(table, p41=([5, 777], command), p40=([888, 999], b"other"), self=([5, 777], b"self"), p42=([], None))
    assert holder_of(29500) == told


def test_a_listener_without_a_process_here_belongs_to_somebody_else(proc: Callable[..., None]) -> None:
    proc("tcp", p40=([888, 999], b"other"), self=([777], b"self"), p42=([], None))
    assert holder_of(29500) == "a process of another user or container"
    assert holder_of(29502) == "a process that cannot be seen from here"
