"""Operations whose results do not depend on the order in which threads finish."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import deterministic


def repeat_exactly(device: str, *, debug: bool = False) -> None:
    """Use deterministic operations on a CPU, and any on a GPU, where deterministic ones cost too much.

    With them torch also fills every new tensor with NaN before anything is written there, which a cache of keys and
    values pays for at each rollout: that is left to `debug`, where reading too early is to be seen.
    """
    # the same switch as `torch.use_deterministic_algorithms`, which loads torch's compiler for two seconds
    torch.set_deterministic_debug_mode("error" if device == "cpu" else "default")
    module: Any = deterministic  # its class has the setting
    module.fill_uninitialized_memory = debug
