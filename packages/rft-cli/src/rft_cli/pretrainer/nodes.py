"""Machines that each start the ranks of one run with the same command, as the pre-trainer's guide has it.

The number of ranks is that of machines times processes of each. A run on one machine needs none of this: its ranks
meet at a free port.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from rft_cli.config.resolve import is_launched, merge
from rft_cli.pretrainer.fields import COMMAND, ENVIRONMENT
from rft_core.errors import OptionsError
from rft_dist.launch.spawn import Nodes

_PORT = 12355
"""The guide's default."""


def nodes(argv: Sequence[str]) -> Nodes | None:
    """Return the machines that a command line, its files and the environment name; None where it is this one alone.

    Raises:
        OptionsError: several machines, and no number of this one or no place to meet.
    """
    if is_launched(os.environ):
        return None
    given = merge(COMMAND, argv).foreign
    number: int = given.get("distributed_num_nodes", 1)
    rank, host, port = (given.get(f"distributed_{name}") for name in ("node_rank", "master_addr", "master_port"))
    # the address alone may be there for another program: it counts where the guide's own variables are
    named = [name for name in ("num_nodes", "gpus_per_node", "node_rank") if f"distributed_{name}" in given]
    if number == 1:
        if rank:
            raise _refused(
                f"node_rank = {rank}", "the machines are numbered from 0, and there is one", "num_nodes", "2"
            )
        return Nodes(1, 0, host, port or _PORT) if named and host else None
    if rank is None:
        raise _refused(f"num_nodes = {number}", "each machine says which of them it is, from 0", "node_rank", "0")
    if rank >= number:
        why = f"machines are numbered from 0 to {number - 1}"
        raise _refused(f"node_rank = {rank}, num_nodes = {number}", why, "node_rank", str(number - 1))
    if not host:
        raise _refused(f"num_nodes = {number}", "all ranks meet at the first machine", "master_addr", "HOST")
    if "distributed_gpus_per_node" not in given:
        why = "every machine starts as many processes, and all know how many there are in all"
        raise _refused(f"num_nodes = {number}", why, "gpus_per_node", "8")
    return Nodes(number, rank, host, port or _PORT)


def _refused(what: str, why: str, name: str, value: str) -> OptionsError:
    variable = next(key for key, field in ENVIRONMENT.items() if field == f"distributed_{name}")
    return OptionsError(
        code="pretrainer.nodes",
        what=what,
        where="the group distributed",
        why=why,
        state="nothing was started",
        do=f"--distributed-{name.replace('_', '-')} {value} (or export {variable}={value})",
    )
