"""The share of a GPU that an engine asks for, within what is free; a start that fails for memory is tried once more."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from rft_core.errors import ServiceError
from rft_engine.process.settings import ExternalEngineSettings

_LOG = logging.getLogger(__name__)
SettingsT = TypeVar("SettingsT", bound=ExternalEngineSettings)
EngineT = TypeVar("EngineT")

USUAL_SHARE = 0.92
"""vLLM's own default."""
_LEFT_MIB = 512
"""Of what is free, left to the contexts of other libraries."""
_LEAST_SHARE = 0.05
"""Below it a start is not worth trying."""
_NAMED = re.compile(r"--engine_mem_util ([\d.]+)")


def share_within(wanted: float, free_mib: int, total_mib: int) -> float | None:
    """Return the share of all memory to ask for: the wanted one where it is free, else what is; None = too little.

    It is rounded down to hundredths, because a share that is a little too high fails.

    Args:
        wanted: share of all memory of the device, as vLLM counts it.
        free_mib: MiB that are free before the start.
        total_mib: MiB of the device.
    """
    if total_mib <= 0 or wanted * total_mib <= free_mib:
        return wanted
    fitting = math.floor(100 * (free_mib - _LEFT_MIB) / total_mib) / 100
    return min(wanted, fitting) if fitting >= _LEAST_SHARE else None


def within_free(settings: SettingsT, free_mib: int, total_mib: int) -> SettingsT:
    """Return the settings with a share that is free, and say so where it is less than was asked for.

    Where too little is free they stay as they are: the start then fails with an error that names who holds the memory.
    """
    wanted = settings.memory_utilization or USUAL_SHARE
    share = share_within(wanted, free_mib, total_mib)
    if share is None or share >= wanted:
        return settings
    _LOG.warning(
        "%s is started with --engine_mem_util %g: %g of %s MiB are more than the %s MiB that are free",
        settings.library_name,
        share,
        wanted,
        f"{total_mib:,}",
        f"{free_mib:,}",
    )
    return replace(settings, memory_utilization=share)


def started(make: Callable[[SettingsT], EngineT], settings: SettingsT) -> EngineT:
    """Start an engine; where its memory did not suffice and a smaller share is the remedy, once more with that.

    Raises:
        ServiceError: it did not start, or not with the smaller share either.
    """
    try:
        return make(settings)
    except ServiceError as error:
        share = smaller_share(settings, error)
        if share is None:
            raise
        _LOG.warning("%s; it is started once more with --engine_mem_util %g", error.problem.what, share)
    # outside the handler: the error holds what the first start left
    return make(replace(settings, memory_utilization=share))


def smaller_share(settings: ExternalEngineSettings, error: ServiceError) -> float | None:
    """Return the share that the error of a start advises, where it is about memory and less than was asked for."""
    if not error.problem.code.startswith((f"engine.{settings.library}.memory.", f"engine.{settings.library}.start")):
        return None
    named = _NAMED.search(error.problem.do)
    share = float(named[1]) if named else math.inf
    return share if share < (settings.memory_utilization or USUAL_SHARE) else None
