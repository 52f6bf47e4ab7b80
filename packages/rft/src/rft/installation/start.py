"""Look at driver, kernels and versions when a run starts: what stands in its way is an error, the rest a warning."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable

from rft.installation.devices import Card, TorchBuild, driver_version, gpus, runs_on, torch_here
from rft.installation.facts import MachineFact
from rft.installation.packages import package_versions
from rft_core.errors import PreflightError

_LOG = logging.getLogger(__name__)
TorchHere = Callable[[int | None], tuple[TorchBuild, tuple[Card, ...]]]


def why_no_gpu(find: TorchHere = torch_here, driver: Callable[[], str | None] = driver_version) -> MachineFact | None:
    """Return why torch sees no GPU on a machine that has an NVIDIA driver; None without one, or where it sees some."""
    version = driver()
    if version is None:
        return None
    build, cards = find(None)
    found = gpus(build, cards, version, os.environ.get("CUDA_VISIBLE_DEVICES"))[1]
    return None if found.verdict == "ok" else found


def check_installation(
    wanted: str,
    device: str,
    *,
    is_first: bool = True,
    find: TorchHere = torch_here,
    driver: Callable[[], str | None] = driver_version,
    versions: Callable[[], Iterable[MachineFact]] = package_versions,
) -> None:
    """Warn of versions that do not go together, and of a GPU that is left unused against the will of the settings.

    Args:
        wanted: `device` of the settings: auto, cpu or cuda.
        device: what it became, such as `cuda:0`.
        is_first: whether this process is the one that warns.
        find: the installed torch, and the GPUs that it sees or the one with a number.
        driver: version of the NVIDIA driver; None where there is none.
        versions: findings on what the packages require of one another, and on versions that were not tested.

    Raises:
        PreflightError: the installed torch has no kernels for this GPU.
    """
    if device.startswith("cuda"):
        build, (card,) = find(int(device.partition(":")[2] or 0))
        _require_kernels(device, build, card)
    elif wanted == "auto" and is_first:
        unused = why_no_gpu(find, driver)
        if unused is not None and unused.verdict == "problem":
            _LOG.warning("the run is on the CPU: %s; %s. Do: %s", unused.value, unused.why, unused.do)
    for fact in versions() if is_first else ():
        if fact.verdict == "problem":
            _LOG.warning("%s is %s, and %s. Do: %s", fact.subject, fact.value, fact.why, fact.do)
        elif fact.verdict == "note":
            _LOG.warning("%s is %s, and %s", fact.subject, fact.value, fact.why)


def _require_kernels(device: str, build: TorchBuild, card: Card) -> None:
    if runs_on(card.capability, build.architectures):
        return
    major, minor = card.capability
    raise PreflightError(
        code="device.no_kernels",
        what=f"{card.name} has capability {major}.{minor}, and torch {build.version} has kernels for "
        f"{', '.join(build.architectures)}",
        where=f"--device, {device}",
        why="its first product would end with: no kernel image is available for execution on the device",
        state="no model was loaded",
        do=f"a torch that is built for sm_{major}{minor}, or --device cpu",
    )
