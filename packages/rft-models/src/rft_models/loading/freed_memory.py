"""Host memory that a computation has freed stays with the process, for the next one of the same size.

By default glibc hands the upper end of its heap back to the kernel as soon as twice the largest block freed so far is
free there, and each micro-batch then waits for new pages where the last one's were: of a GRPO step of a model of width
64 on a CPU, 12,000 to 25,000 page faults and a tenth of the time. What is kept is at most `KEPT_BYTES`, and was in use
before, so that the most that a process holds stays as it is.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

KEPT_BYTES = 512 * 2**20
"""Free memory at the upper end of the heap above which it goes back to the kernel."""

_LARGE_BLOCK = 32 * 2**20
"""Blocks from this size on are mapped alone and go back at once: where glibc itself stops raising this bound."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Numbers of `mallopt` in glibc's malloc.h."""


@cache
def keep_freed_memory() -> bool:
    """Let this process keep freed host memory, once; return whether it does.

    Nothing is changed where the environment says how the allocator shall work, and where it is not glibc's.
    """
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
    ):
        return False
    try:
        library = ctypes.CDLL(None)
        # musl has neither; another allocator that is loaded before glibc's brings its own `mallopt`, or gets no calls
        library.gnu_get_libc_version  # noqa: B018 - looked up, and not called
        mallopt = library.mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)) and bool(mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
