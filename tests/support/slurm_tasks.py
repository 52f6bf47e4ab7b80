"""What a child does to itself before its run: be a task of `srun`, on as many machines as there are tasks."""

from __future__ import annotations

import os

JOB = 4321


def as_task_of_srun(restart: int = 0) -> None:
    """Have SLURM's variables in place of a launcher's, one task a machine; `restart` is the number of the requeue."""
    rank, num_tasks = os.environ.pop("RANK", "0"), os.environ.pop("WORLD_SIZE", "1")
    os.environ.pop("LOCAL_RANK", None)
    os.environ |= {
        "SLURM_JOB_ID": f"{JOB}",
        "SLURM_STEP_ID": f"{restart}",
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": rank,
        "SLURM_STEP_NUM_TASKS": num_tasks,
        "SLURM_STEP_NUM_NODES": num_tasks,
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{num_tasks})",
        "SLURM_STEP_NODELIST": f"node[1-{num_tasks}]",
    }
    if num_tasks != "1":
        # this machine, written as no start takes for one that other machines cannot reach
        os.environ["MASTER_ADDR"] = "0x7f000001"
    if restart:
        os.environ["SLURM_RESTART_COUNT"] = f"{restart}"
