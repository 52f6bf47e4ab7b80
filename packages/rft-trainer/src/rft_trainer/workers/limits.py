"""Limits of the processes that run user code: memory, and the secrets of the environment that they see."""

from __future__ import annotations

from dataclasses import dataclass

from rft_core.host_memory import total_host_memory


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Memory that a process may take, and the secrets that it may see.

    Example::

        ProcessLimits(data_bytes=16 << 30, variables=("HF_TOKEN", "AWS_*"))
    """

    address_bytes: int = 0
    """Address space; what libraries make of its end is not trusted. 0 = no limit."""
    data_bytes: int = 0
    """Memory of its own that it may write, which leaves out the address space that a GPU's driver reserves; of each
    process that it starts too. 0 = no limit."""
    variables: tuple[str, ...] = ()
    """Patterns of variables of the environment that it sees although their names are those of secrets."""


def user_code_limits(memory_gib: float, variables: str) -> ProcessLimits:
    """Return the limits of a user's file; `variables` are patterns joined by commas.

    0 GiB are half of the machine's memory: one process that takes all of it has the whole run killed.
    """
    data_bytes = int(memory_gib * 2**30) or total_host_memory() // 2
    names = tuple(filter(None, map(str.strip, variables.split(","))))
    return ProcessLimits(data_bytes=data_bytes, variables=names)
