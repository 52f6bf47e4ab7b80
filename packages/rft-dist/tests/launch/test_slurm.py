"""Ranks from the variables of srun, and its lists of hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rft_core.errors import PreflightError
from rft_dist.launch.environment import environment_report, ranks_from_environment
from rft_dist.launch.slurm import (
    FIRST_PORT,
    NUM_PORTS,
    SlurmTask,
    hosts_of,
    num_tasks_unused,
    port_of,
    task_of,
    tasks_per_node,
)

TASK = {
    "SLURM_JOB_ID": "12001",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
SCRIPT = {"SLURM_JOB_ID": "12001", "SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_NODEID": "0"}


def test_a_task_of_srun_knows_its_place_and_where_it_is_from() -> None:
    info = ranks_from_environment(TASK)
    assert (info.rank, info.world_size, info.local_rank, info.node_rank) == (9, 16, 1, 1)
    assert (info.master_addr, info.master_port) == ("gpu07", FIRST_PORT + 1)
    assert info.origins["rank"] == "SLURM_PROCID (SLURM)"
    assert info.origins["master_addr"] == "first host of SLURM_STEP_NODELIST (SLURM)"


def test_every_task_of_a_step_meets_at_one_place_and_has_a_rank_of_its_own() -> None:
    infos = [
        ranks_from_environment(
            {**TASK, "SLURM_PROCID": f"{i}", "SLURM_NODEID": f"{i // 8}", "SLURM_LOCALID": f"{i % 8}"}
        )
        for i in range(16)
    ]
    assert {(info.master_addr, info.master_port) for info in infos} == {("gpu07", FIRST_PORT + 1)}
    assert [info.rank for info in infos] == list(range(16))
    assert [info.local_rank for info in infos] == [*range(8), *range(8)]


def test_the_body_of_a_job_script_is_one_process_and_says_what_it_leaves_unused() -> None:
    assert ranks_from_environment(SCRIPT).world_size == 1
    assert num_tasks_unused(SCRIPT) == 16
    assert num_tasks_unused(TASK) == 0
    assert num_tasks_unused({}) == 0


def test_a_step_of_one_task_leaves_its_ranks_to_torchrun() -> None:
    one = {**TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert task_of(one) is None
    ranks = {"MASTER_ADDR": "h", "MASTER_PORT": "29500", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}
    info = ranks_from_environment({**one, **ranks, "TORCHELASTIC_RUN_ID": "x"})
    assert (info.rank, info.origins["rank"]) == (3, "RANK (torchrun)")


def test_an_address_and_a_port_that_are_exported_hold() -> None:
    info = ranks_from_environment({**TASK, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert (info.rank, info.master_addr, info.master_port) == (9, "10.0.0.1", 29500)
    assert info.origins["master_addr"] == "MASTER_ADDR (the environment)"
    assert info.origins["rank"] == "SLURM_PROCID (SLURM)"


def test_variables_of_slurm_are_listed_with_what_they_do() -> None:
    rows = {name: effect for name, _, effect in environment_report(TASK)}
    assert {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_LOCALID", "SLURM_NODEID"} <= set(rows)
    assert all(effect.endswith("set by SLURM") for effect in rows.values())


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("vm", ["vm"]),
        ("a,b", ["a", "b"]),
        ("gpu[08-10,12],login1", ["gpu08", "gpu09", "gpu10", "gpu12", "login1"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
        ("node[098-101].cluster", ["node098.cluster", "node099.cluster", "node100.cluster", "node101.cluster"]),
        ("a-b[9-10]", ["a-b9", "a-b10"]),
    ],
)
def test_a_list_of_hosts_is_written_out(text: str, hosts: list[str]) -> None:
    assert hosts_of(text) == hosts


@pytest.mark.parametrize("text", ["gpu[1-", "gpu[a-b]", "gpu]1[", "a b", "gpu[]", ","])
def test_a_list_that_cannot_be_read_is_refused_with_the_command_that_can(text: str) -> None:
    with pytest.raises(PreflightError) as caught:
        hosts_of(text)
    assert caught.value.problem.code == "launch.slurm_hosts"
    assert "scontrol show hostnames" in caught.value.problem.do


def test_tasks_of_each_node_are_written_out() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("") == []
    assert tasks_per_node("2(y3)") == []


def test_ports_of_neighbouring_jobs_and_steps_differ_and_stay_below_those_of_outgoing_connections() -> None:
    ports = [port_of(job, 0) for job in range(NUM_PORTS)]
    assert len(set(ports)) == NUM_PORTS
    assert (min(ports), max(ports)) == (20000, 31999)
    assert len({port_of(7, step) for step in range(12)}) == 12


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID"])
def test_a_number_of_slurm_that_is_none_is_named(name: str) -> None:
    with pytest.raises(PreflightError, match=f"{name} = 'x'") as caught:
        ranks_from_environment({**TASK, name: "x"})
    assert caught.value.problem.code == "launch.slurm_value"


def test_a_task_is_what_the_variables_of_its_step_say() -> None:
    task = SlurmTask(
        rank=9,
        world_size=16,
        local_rank=1,
        node_rank=1,
        num_nodes=2,
        tasks_here=8,
        first_host="gpu07",
        port=FIRST_PORT + 1,
    )
    assert task_of(TASK) == task
    for name, changes in (
        ("SLURM_STEP_NUM_TASKS", {}),
        ("SLURM_LOCALID", {"local_rank": 0}),
        ("SLURM_NODEID", {"node_rank": 0}),
        ("SLURM_STEP_NUM_NODES", {}),
        ("SLURM_STEP_TASKS_PER_NODE", {"tasks_here": 0}),
        ("SLURM_JOB_ID", {"port": FIRST_PORT}),
        ("SLURM_STEP_ID", {}),
    ):
        rest = {other: value for other, value in TASK.items() if other != name}
        assert task_of(rest) == replace(task, **changes), name
    for name in ("SLURM_STEP_NODELIST", "SLURM_PROCID"):
        assert task_of({other: value for other, value in TASK.items() if other != name}) is None
    assert task_of({**TASK, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}) == replace(task, rank=1, world_size=2)
    assert task_of({**TASK, "SLURM_STEP_NUM_NODES": "5", "SLURM_STEP_ID": "2"}) == replace(
        task, num_nodes=5, port=FIRST_PORT + 1 + 2 * 997
    )
    for text, here in (("8", 0), ("3,5", 5), ("4(x3)", 4)):
        assert task_of({**TASK, "SLURM_STEP_TASKS_PER_NODE": text}) == replace(task, tasks_here=here)


def test_only_several_tasks_of_a_job_are_unused() -> None:
    assert [num_tasks_unused({**SCRIPT, "SLURM_NTASKS": text}) for text in ("1", "2", "x", "")] == [0, 2, 0, 0]
    assert num_tasks_unused({"SLURM_NTASKS": "2"}) == 0
