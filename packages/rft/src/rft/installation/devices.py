"""Findings on GPUs: the driver beside torch's build, each card beside the kernels of that build, who holds memory."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from rft.installation.facts import MachineFact

_SECONDS = 20.0
_FREE_ENOUGH = 0.9
_SUPPORTED = (
    (590, "13.1"),
    (580, "13.0"),
    (575, "12.9"),
    (570, "12.8"),
    (560, "12.6"),
    (555, "12.5"),
    (550, "12.4"),
    (545, "12.3"),
    (535, "12.2"),
    (530, "12.1"),
    (525, "12.0"),
    (520, "11.8"),
    (515, "11.7"),
    (510, "11.6"),
    (470, "11.4"),
    (450, "11.0"),
)
"""Newest CUDA of each branch of the driver (NVIDIA, CUDA Toolkit Release Notes, table of toolkits and drivers)."""
_OLDEST = {"13": 580, "12": 525, "11": 450}
"""Oldest branch that runs builds of a major version of CUDA, whatever their minor version (same notes)."""
_BUILD = {"13": "cu130", "12": "cu126"}
"""A build of torch for each major version of CUDA, as its wheels are tagged."""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The torch that is installed, as far as GPUs go."""

    version: str
    cuda: str | None
    """CUDA version that it was built with; None for a build for CPUs."""
    architectures: tuple[str, ...]
    """Architectures with kernels of their own, such as `sm_90`, and `compute_90` for code that a driver compiles."""
    num_devices: int
    """GPUs that it sees."""
    driver_cuda: str | None = None
    """Newest CUDA that the driver says it supports; None where it cannot be asked."""
    cudnn_built: tuple[int, ...] = ()
    """Version of cuDNN that it was built with; empty for none."""
    cudnn_loaded: tuple[int, ...] = ()
    """Version of the cuDNN that is loaded; empty for none."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU that torch sees."""

    name: str
    capability: tuple[int, int]
    has_bfloat16: bool


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds memory of a GPU."""

    pid: int
    name: str
    used_mib: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a GPU, as the driver's tool tells it."""

    index: int
    total_mib: int
    free_mib: int
    holders: tuple[Holder, ...] = ()


def torch_here(only: int | None = None) -> tuple[TorchBuild, tuple[Card, ...]]:
    """Return the installed torch and the GPUs that it sees, or the one with this number alone."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    architectures = tuple(torch.cuda.get_arch_list()) if count else ()
    build = TorchBuild(
        torch.__version__, torch.version.cuda, architectures, count, driver_cuda(), *(_cudnn() if count else ((), ()))
    )
    bfloat16 = count > 0 and torch.cuda.is_bf16_supported(including_emulation=False)
    cards = tuple(
        Card(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i), bfloat16)
        for i in (range(count) if only is None else (only,))
    )
    return build, cards


def driver_cuda() -> str | None:
    """Return the newest CUDA that the NVIDIA driver supports, as its own library says; None where there is none."""
    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)):
            return None
    except (OSError, AttributeError):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}" if number.value else None


def _cudnn() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the version of cuDNN that torch was built with, and that of the one that is loaded."""
    import torch

    library = getattr(torch._C, "_cudnn", None)  # pyright: ignore[reportPrivateUsage]
    if library is None:
        return (), ()
    loaded = int(library.getVersionInt())
    # from cuDNN 9 on a version has five digits behind the major one's place: 91002 is 9.10.2
    major, rest = divmod(loaded, 10_000 if loaded >= 90_000 else 1000)
    return tuple(library.getCompileVersion()), (major, *divmod(rest, 100))


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver; None where its tool is absent or fails."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.splitlines()[0].strip() if answer.strip() else None


def gpus(build: TorchBuild, cards: Sequence[Card], driver: str | None, hidden: str | None) -> list[MachineFact]:
    """Return findings on the driver and on each GPU.

    Args:
        build: the installed torch.
        cards: GPUs that it sees.
        driver: version of the NVIDIA driver; None where there is none.
        hidden: value of CUDA_VISIBLE_DEVICES; None where it is not set.
    """
    findings = [_build(build), _driver(build, driver, hidden), *_cudnn_finding(build)]
    findings += [_card(number, card, build) for number, card in enumerate(cards)]
    return findings


def memory(devices: Sequence[Memory]) -> list[MachineFact]:
    """Return findings on the memory of GPUs and on who holds it."""
    findings: list[MachineFact] = []
    for device in devices:
        subject = f"memory of GPU {device.index}"
        value = f"{device.free_mib / 1024:.1f} of {device.total_mib / 1024:.1f} GiB free"
        if device.free_mib >= _FREE_ENOUGH * device.total_mib:
            findings.append(MachineFact(subject, value))
            continue
        visible = ", ".join(f"pid {h.pid} ({h.name}) {h.used_mib / 1024:.1f} GiB" for h in device.holders)
        seen = sum(holder.used_mib for holder in device.holders)
        others = device.total_mib - device.free_mib - seen
        rest = f"{others / 1024:.1f} GiB by processes that cannot be seen from here" if others > 0 else ""
        why = f"held by {' and '.join(filter(None, (visible, rest)))}"
        first = device.holders[0].pid if device.holders else None
        do = f"end them if they are yours (kill {first}), or take another GPU: CUDA_VISIBLE_DEVICES" if first else ""
        findings.append(MachineFact(subject, value, "note", why, do))
    return findings


def _build(build: TorchBuild) -> MachineFact:
    kind = f"built for CUDA {build.cuda}" if build.cuda else "built for CPUs"
    return MachineFact("torch", f"{build.version}, {kind}")


def _cudnn_finding(build: TorchBuild) -> list[MachineFact]:
    """Return the finding on cuDNN where it is loaded.

    A library of the same major version and at least the minor one that torch was built with can be used.
    """
    built, loaded = build.cudnn_built, build.cudnn_loaded
    if not built or not loaded:
        return []
    value, wanted = (".".join(map(str, version)) for version in (loaded, built))
    if loaded[0] == built[0] and loaded[1] >= built[1]:
        return [MachineFact("cuDNN", value)]
    why = f"torch {build.version} is built for cuDNN {wanted}; another installation of it is found first"
    do = "leave the folder of that installation out of LD_LIBRARY_PATH"
    return [MachineFact("cuDNN", value, "problem", why, do)]


def _driver(build: TorchBuild, driver: str | None, hidden: str | None) -> MachineFact:
    if driver is None:
        if build.num_devices:
            return MachineFact(
                "driver", "its tool nvidia-smi does not answer", "note", "who holds memory cannot be seen"
            )
        return MachineFact("GPU", "none: runs are on the CPU")
    if build.num_devices:
        return MachineFact("driver", driver)
    value = f"driver {driver}, and torch sees no GPU"
    if hidden is not None and hidden.strip() in ("", "-1"):
        return MachineFact(
            "GPU", value, "note", f"CUDA_VISIBLE_DEVICES={hidden!r} hides them", "unset CUDA_VISIBLE_DEVICES"
        )
    if build.cuda is None:
        do = "uv sync --reinstall-package torch"
        return MachineFact("GPU", value, "problem", f"torch {build.version} is built for CPUs", do)
    old = too_old(driver, build)
    if old is not None:
        return old
    why = f"as far as is known the driver goes with CUDA {build.cuda}: the GPUs may belong to another container"
    return MachineFact("GPU", value, "problem", why, "nvidia-smi -L (it lists the GPUs that are handed to this one)")


def too_old(driver: str, build: TorchBuild) -> MachineFact | None:
    """Return the problem of a driver that cannot run this build of torch, with what fits; None where it can."""
    branch = int(driver.partition(".")[0]) if driver.partition(".")[0].isdecimal() else None
    major = (build.cuda or "").partition(".")[0]
    oldest = _OLDEST.get(major)
    if build.driver_cuda is not None and major.isdecimal():
        # a driver runs builds of the major version that it supports, whatever their minor one, and of older ones
        supported = build.driver_cuda
        if int(supported.partition(".")[0]) >= int(major):
            return None
    elif branch is None or oldest is None or branch >= oldest:
        return None
    else:
        supported = next((version for first, version in _SUPPORTED if branch >= first), "")
    fits = _BUILD.get(supported.partition(".")[0])
    needed = f"driver {oldest} or newer" if oldest else f"a driver that supports CUDA {major}"
    why = (
        f"the driver is too old: it supports CUDA {supported or 'below 11.0'}, and torch {build.version} is built for "
        f"CUDA {build.cuda}, which needs {needed}"
    )
    do = f"a {needed.removeprefix('a ').replace('driver', 'driver of', 1)}" if oldest else needed
    if fits:
        place = f"https://download.pytorch.org/whl/{fits}"
        do = f"uv pip install torch --index-url {place} (built for a CUDA that the driver has), or {do}"
    return MachineFact("GPU", f"driver {driver}, and torch sees no GPU", "problem", why, do)


def _card(number: int, card: Card, build: TorchBuild) -> MachineFact:
    major, minor = card.capability
    subject, value = f"GPU {number}", f"{card.name}, capability {major}.{minor}"
    if not runs_on(card.capability, build.architectures):
        why = f"torch {build.version} has kernels for {', '.join(build.architectures)}: no kernel image would be found"
        do = f"a torch that is built for sm_{major}{minor}"
        return MachineFact(subject, value, "problem", why, do)
    if not card.has_bfloat16:
        return MachineFact(subject, value, "note", "it has no bfloat16 arithmetic and emulates it", "--amp, not --bf16")
    return MachineFact(subject, value)


def runs_on(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Return true where a build has code for a GPU.

    Machine code `sm_XY` runs on the same major version from X.Y on; `compute_XY` is compiled by the driver for every
    capability from X.Y on; a letter behind the number, as in `sm_90a`, binds it to that capability alone.
    """
    for name in architectures:
        kind, _, number = name.partition("_")
        digits = number.rstrip("abcdefghijklmnopqrstuvwxyz")
        if not digits.isdigit():
            continue
        built = (int(digits[:-1]), int(digits[-1]))
        if digits != number and number[-1] != "f":
            fits = built == capability
        elif kind == "compute":
            fits = built <= capability
        else:
            fits = built[0] == capability[0] and built[1] <= capability[1]
        if fits:
            return True
    return False
