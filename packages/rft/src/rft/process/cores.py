"""Cores that this process may use, and whether a GPU may be there. No torch is imported here."""

from __future__ import annotations

import math
import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))
"""Devices of the drivers of NVIDIA, of AMD, and of Windows under WSL."""


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and the quota of its control group where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = (_QUOTA.read_text() if _QUOTA.is_file() else "").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def may_have_gpu() -> bool:
    """Return True where the driver of a GPU is loaded; whether torch can use it, torch alone can say."""
    return any(path.exists() for path in _GPU_DRIVERS)
