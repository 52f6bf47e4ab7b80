"""Rank of an `srun` task, from the variables that SLURM sets in it; no scontrol and no torch.

Inside `srun` every task has SLURM_PROCID (its rank), SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_NODEID and
SLURM_STEP_NODELIST. The body of an sbatch script has SLURM_PROCID and SLURM_NTASKS too, but no
SLURM_STEP_NODELIST: it is one process, whatever the job's number of tasks. A step of one task is one
process as well, which may start ranks of its own (torchrun, --nproc).
Source: srun(1) and sbatch(1), "OUTPUT ENVIRONMENT VARIABLES"; seen so in SLURM 22.05.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rft_core.errors import PreflightError

FIRST_PORT, NUM_PORTS = 20000, 12000
"""Ports chosen from job numbers: below Linux' range for outgoing connections (from 32768 on)."""

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class SlurmTask:
    """One task of a step of several tasks."""

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    num_nodes: int
    tasks_here: int
    """Tasks of the step on this node; 0 where SLURM does not say."""
    first_host: str
    port: int
    """The same in every task of the step, and mostly another one in another job."""


def task_of(values: Mapping[str, str]) -> SlurmTask | None:
    """The task that this process is, or None outside `srun` and in a step of one task.

    Raises:
        PreflightError: a variable of SLURM that is missing, no number, or a list of hosts that cannot be read.
    """
    if not values.get("SLURM_STEP_NODELIST") or not values.get("SLURM_PROCID"):
        return None
    counted = "SLURM_STEP_NUM_TASKS" if values.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    world_size = _number(values, counted)
    if world_size < 2:
        return None
    node_rank = _number(values, "SLURM_NODEID", 0)
    hosts = hosts_of(values["SLURM_STEP_NODELIST"])
    tasks = tasks_per_node(values.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return SlurmTask(
        rank=_number(values, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(values, "SLURM_LOCALID", 0),
        node_rank=node_rank,
        num_nodes=_number(values, "SLURM_STEP_NUM_NODES", len(hosts)),
        tasks_here=tasks[node_rank] if node_rank < len(tasks) else 0,
        first_host=hosts[0],
        port=port_of(_number(values, "SLURM_JOB_ID", 0), _number(values, "SLURM_STEP_ID", 0)),
    )


def num_tasks_unused(values: Mapping[str, str]) -> int:
    """Tasks of a job whose script this process runs in without srun, where there are several; else 0."""
    in_script = values.get("SLURM_JOB_ID") and not values.get("SLURM_STEP_NODELIST")
    tasks = values.get("SLURM_NTASKS", "")
    return int(tasks) if in_script and tasks.isdecimal() and int(tasks) > 1 else 0


def port_of(job: int, step: int) -> int:
    """A TCP port for a step: its own for 12,000 consecutive jobs, and another one for each of a job's steps.

    Example: `port_of(12001, 0)` is 20001.
    """
    return FIRST_PORT + (job + 997 * step) % NUM_PORTS


def hosts_of(text: str) -> list[str]:
    """The hosts of a SLURM node list, in its order.

    Example: `hosts_of("gpu[08-10,12],login1")` is gpu08, gpu09, gpu10, gpu12, login1.
    Raises PreflightError for a list that does not have this form.
    """
    hosts = [host for part in _outside_brackets(text) for host in _expanded(part, text)]
    if not hosts or any(not re.fullmatch(r"[\w.-]+", host) for host in hosts):
        raise _bad_list(text)
    return hosts


def tasks_per_node(text: str) -> list[int]:
    """`"2(x3),1"` is 2, 2, 2, 1; empty for another form."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _outside_brackets(text: str) -> list[str]:
    """Split at the commas that stand outside brackets."""
    parts, depth = [""], 0
    for letter in text.strip():
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _expanded(part: str, node_list: str) -> list[str]:
    """Every host of one part, its brackets from left to right."""
    match = _BRACKETS.search(part)
    if not match:
        return [part]
    rest = _expanded(part[match.end() :], node_list)
    middles: list[str] = []
    for piece in match[1].split(","):
        numbers = _RANGE.fullmatch(piece)
        if not numbers:
            raise _bad_list(node_list)
        first, last = numbers[1], numbers[2] or numbers[1]
        # leading zeros belong to a host's name
        middles += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return [part[: match.start()] + middle + end for middle in middles for end in rest]


def _number(values: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = values.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise PreflightError(
            code="launch.slurm_value",
            what=f"{name} = {text!r}" if text else f"{name} is not set, but SLURM_STEP_NODELIST is",
            where=f"{name} (SLURM)",
            why="a task's rank and machine follow from numbers that srun sets",
            do="start the program with srun, or export MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE",
        )
    return int(text)


def _bad_list(text: str) -> PreflightError:
    return PreflightError(
        code="launch.slurm_hosts",
        what=f"SLURM_STEP_NODELIST = {text!r} cannot be read as a list of hosts",
        where="SLURM_STEP_NODELIST (SLURM)",
        why="the ranks meet at the first host of the step",
        do=f"export MASTER_ADDR=$(scontrol show hostnames '{text}' | head -n1)",
    )
