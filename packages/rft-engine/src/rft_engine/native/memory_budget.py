"""Cache sizes computed from the free memory before a cache is allocated, so that no call runs out of memory.

A model that computes how large a cache is (`SizedCaches`) is checked; for another one the rows asked for
are taken. On a CPU the free memory is the least of what the system can hand out and what the control groups
of this process leave; on a GPU it is the device's free memory and what torch has reserved without using it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from rft_core.errors import PreflightError
from rft_core.host_memory import free_host_memory

FreeMemory: TypeAlias = Callable[[torch.device], int | None]
"""Bytes that may be taken on a device; None = unknown."""

_MARGIN_SHARE, _MOST_MARGIN = 64, 2**28  # a 64th of what is free, at most 256 MiB, is left to everything else
_LOGIT_COPIES = 4  # [rows, vocabulary] float32 at once: logits, scaled, log-probs, cumulative mass
_MIB = 2**20


@runtime_checkable
class SizedCaches(Protocol):
    """A `DecodableModel` that knows how large its caches become."""

    def cache_bytes(self, max_rows: int, max_len: int, *, num_prompts: int, prompt_len: int) -> int:
        """Bytes of keys and values at their peak, copies of a step included.

        Args:
            max_rows, max_len: as of `new_cache`.
            num_prompts, prompt_len: prompts in use at once, and tokens of the longest.
        """
        ...


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """Cache that a call asks for: rows decoded at once and tokens of each."""

    rows: int
    length: int
    """Tokens of the longest sequence, prompt included."""
    num_prompts: int
    prompt_len: int

    def bytes_of(self, model: SizedCaches, vocab_size: int) -> int:
        """Keys, values and the logits of a step."""
        prompts = min(self.num_prompts, self.rows)  # a prompt stays as long as one of its rows
        kept = model.cache_bytes(self.rows, self.length, num_prompts=prompts, prompt_len=self.prompt_len)
        return kept + self.rows * vocab_size * 4 * _LOGIT_COPIES


def max_rows_that_fit(
    model: object, vocab_size: int, demand: CacheRequest, device: torch.device, free: FreeMemory
) -> int:
    """The most rows, up to those of the demand, that fit into the free memory.

    Raises:
        PreflightError: not even one sequence fits.
    """
    if not isinstance(model, SizedCaches):
        return demand.rows
    available = free(device)
    if available is None:
        return demand.rows
    # other tensors of a step and other processes need room between this look and the allocation
    available -= min(available // _MARGIN_SHARE, _MOST_MARGIN)
    rows = _most(demand.rows, lambda rows: replace(demand, rows=rows).bytes_of(model, vocab_size) <= available)
    if rows:
        return rows
    one = replace(demand, rows=1)

    def fits(length: int) -> bool:
        shorter = replace(one, length=length, prompt_len=min(one.prompt_len, length))
        return shorter.bytes_of(model, vocab_size) <= available

    raise too_little(one, one.bytes_of(model, vocab_size), available, _most(one.length, fits), device)


def _most(largest: int, fits: Callable[[int], bool]) -> int:
    """The largest number of 1 .. `largest` that fits, 0 where none does; what is below one that fits does too."""
    low, high = 0, largest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def too_little(
    one: CacheRequest, needed: int, available: int, fitting_len: int, device: torch.device
) -> PreflightError:
    """Return the error that one sequence of this length does not fit into the free memory."""
    shorter = f"--max_len {fitting_len}" if fitting_len >= 2 else "a smaller model, or another device"
    return PreflightError(
        code="engine.memory",
        what=f"1 sequence of {one.length} tokens needs {needed / _MIB:.1f} MiB for keys, values and logits, "
        f"{available / _MIB:.1f} MiB are free; {fitting_len} tokens would fit",
        where=f"in-process engine on {device}",
        why="keys and values of a sequence stay in memory until its last token is drawn",
        state="nothing was generated",
        do=f"{shorter}, or free memory on {device}",
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return True when `error` is an allocation failure: torch raises its own type on a GPU and a text on a CPU."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process may still take on a device; None where the system does not report them."""
    if device.type == "cuda":
        # the driver counts what torch has reserved as taken, yet the next allocation may use it
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return free_host_memory() if device.type == "cpu" else None
