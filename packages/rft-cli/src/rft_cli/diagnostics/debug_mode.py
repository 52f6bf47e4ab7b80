"""Debug mode (`--debug`): environment variables set before torch is imported, so `main` sets them first."""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import MutableMapping, Sequence
from itertools import pairwise

VARIABLES = {
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "NCCL_DEBUG": "INFO",
    "CUDA_LAUNCH_BLOCKING": "1",
}


def asked(argv: Sequence[str]) -> bool:
    """Return True when the command line asks for debug mode; the last flag counts."""
    on = False
    for word, following in pairwise([*argv, ""]):
        name, equals, value = word.partition("=")
        if name == "--debug":
            on = (value if equals else following).lower() not in ("false", "0", "no")
        elif name in ("--no-debug", "--no_debug"):
            on = False
    return on


def show_crashes() -> None:
    """Print the stacks of all threads where native code ends the process, as a segmentation fault does."""
    # nothing to write to where standard error is no file; a tool that has set it up itself keeps its own
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if not faulthandler.is_enabled():
            faulthandler.enable()


def switch_on(environment: MutableMapping[str, str]) -> list[str]:
    """Set the variables that are not set already; return the names of those that were set."""
    changed = [name for name in VARIABLES if name not in environment]
    environment.update({name: VARIABLES[name] for name in changed})
    return changed
