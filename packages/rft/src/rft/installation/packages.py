"""Findings on the interpreter and the installed packages: what is asked for, what was tested, what is absent."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

from rft.installation.facts import MachineFact

TESTED = {
    "torch": "2.13.0",
    "transformers": "5.19.0",
    "tokenizers": "0.23.3",
    "safetensors": "0.8.0",
    "pyarrow": "26.0.1",
    "pydantic": "2.14.3",
    "math-verify": "0.9.0",
    "deepspeed": "0.19.8",
    "peft": "0.21.2",
    "flash-attn": "2.8.3.post2",
    "triton": "3.7.1",
}
"""Version of each package that the tests ran with: those of the lock."""
OWN = ("rft-core", "rft-algos", "rft-models", "rft-dist", "rft-engine", "rft-trainer", "rft", "rft-cli")
OPTIONAL: Mapping[str, tuple[str, str]] = {
    "deepspeed": ("deepspeed", "ZeRO (--zero_stage)"),
    "peft": ("lora", "adapters (--lora_rank)"),
    "flash-attn": ("flash-attn", "its attention on GPUs"),
    "triton": ("kernels", "the fused kernels on GPUs"),
    "wandb": ("wandb", "Weights & Biases"),
    "tensorboard": ("tensorboard", "TensorBoard"),
}
"""Packages that one feature alone needs: their extra, and the feature."""
_PYTHONS = ((3, 11), (3, 14))
_EXTRA = re.compile(r'extra == "([^"]+)"')
"""As `packaging` writes the condition of a requirement of an extra."""

VersionOf = Callable[[str], str | None]
"""Version of an installed package by its name; None where it is not installed."""
RequiresOf = Callable[[str], Iterable[str]]
"""What an installed package says that it requires."""


def installed_version(name: str) -> str | None:
    """Return the version of an installed package; None where it is not installed."""
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def requirements_of(name: str) -> Iterable[str]:
    """Return what an installed package requires, extras included; nothing where it is not installed."""
    try:
        return distribution(name).requires or ()
    except PackageNotFoundError:
        return ()


def interpreter(
    version: tuple[int, int], executable: str, prefixes: tuple[str, str], command: str | None
) -> Iterator[MachineFact]:
    """Yield findings on the Python that runs this.

    Args:
        version: major and minor.
        executable: its path.
        prefixes: `sys.prefix` and `sys.base_prefix`, which differ in a virtual environment.
        command: path of the `rft-train` that a shell would start; None where there is none.
    """
    low, high = _PYTHONS
    text = f"{version[0]}.{version[1]} at {executable}"
    if not low <= version < high:
        why = f"versions from {low[0]}.{low[1]} to below {high[0]}.{high[1]} are supported"
        yield MachineFact("python", text, "problem", why, "uv python install 3.12 && uv sync --python 3.12")
    else:
        yield MachineFact("python", text)
    if prefixes[0] == prefixes[1]:
        why = "packages of the system and of RFT replace one another's versions"
        yield MachineFact("virtual environment", "none", "note", why, "uv sync, then uv run rft-train ...")
    else:
        yield MachineFact("virtual environment", prefixes[0])
    if command is None:
        do = f"{executable} -m rft_cli.main in its place, or uv run rft-train"
        yield MachineFact("rft-train", "not on PATH", "note", "a shell does not find the command", do)
    elif (
        Path(command).resolve().parent != Path(executable).parent.resolve()
        and Path(command).parent != Path(executable).parent
    ):
        why = "another installation would answer to the name"
        yield MachineFact("rft-train", command, "note", why, f"{Path(executable).parent / 'rft-train'} in its place")
    else:
        yield MachineFact("rft-train", command)


def here() -> Iterator[MachineFact]:
    """Yield findings on this process's own interpreter."""
    return interpreter(sys.version_info[:2], sys.executable, (sys.prefix, sys.base_prefix), shutil.which("rft-train"))


def requirements(
    version_of: VersionOf = installed_version,
    requires_of: RequiresOf = requirements_of,
    plug_ins: Sequence[str] = (),
) -> list[MachineFact]:
    """Return findings on RFT's own packages, on installed ones that add to it, and on what they all require.

    A requirement that is not met is a problem; another version than the tested one is noted.
    """
    owners = (*OWN, *plug_ins)
    findings = [_own(name, version_of(name)) for name in owners]
    seen: set[str] = set()
    for owner in owners:
        for text in requires_of(owner):
            requirement = Requirement(text)
            if requirement.name in seen or requirement.name in owners or not _applies(requirement):
                continue
            seen.add(requirement.name)
            findings.append(_required(requirement, owner, version_of(requirement.name)))
    return findings


def optional(
    version_of: VersionOf = installed_version,
    requires_of: RequiresOf = requirements_of,
    plug_ins: Sequence[str] = (),
) -> list[MachineFact]:
    """Return findings on packages that one feature alone needs, and on those of the extras of `plug_ins`."""
    findings: list[MachineFact] = []
    for name, (extra, purpose) in OPTIONAL.items():
        version = version_of(name)
        if version is None:
            findings.append(MachineFact(name, f"not installed; needed for {purpose} alone: uv sync --extra {extra}"))
        else:
            findings.append(_compared(name, version))
    findings += [_of_extra(extra, version_of) for name in plug_ins for extra in _extras(name, requires_of)]
    return findings


def package_versions() -> list[MachineFact]:
    """Return findings on all packages whose versions count for a run."""
    return [*requirements(), *optional()]


def _extras(owner: str, requires_of: RequiresOf) -> Iterator[tuple[Requirement, str]]:
    """Yield what an extra of a package requires, with `OWNER[EXTRA]`."""
    for text in requires_of(owner):
        requirement = Requirement(text)
        extra = _EXTRA.search(str(requirement.marker))
        if extra and not _applies(requirement):
            yield requirement, f"{owner}[{extra[1]}]"


def _of_extra(wanted: tuple[Requirement, str], version_of: VersionOf) -> MachineFact:
    requirement, extra = wanted
    version = version_of(requirement.name)
    if version is None:
        command = f'uv pip install "{requirement.name}{requirement.specifier}"'
        return MachineFact(requirement.name, f"not installed; needed for {extra} alone: {command}")
    return _required(requirement, extra, version)


def _own(name: str, version: str | None) -> MachineFact:
    if version is not None:
        return MachineFact(name, version)
    return MachineFact(name, "not installed", "problem", "a package of the project is absent", "uv sync")


def _applies(requirement: Requirement) -> bool:
    """Return true for a requirement of every installation on this machine."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _required(requirement: Requirement, owner: str, version: str | None) -> MachineFact:
    if version is None:
        do = f'uv pip install "{requirement.name}{requirement.specifier}"'
        return MachineFact(requirement.name, "not installed", "problem", f"{owner} needs it", do)
    if not requirement.specifier.contains(version, prereleases=True):
        do = f'uv pip install "{requirement.name}{requirement.specifier}"'
        return MachineFact(requirement.name, version, "problem", f"{owner} needs {requirement.specifier}", do)
    return _compared(requirement.name, version)


def _compared(name: str, version: str) -> MachineFact:
    tested = TESTED.get(name)
    # a build such as 2.13.0+cu130 is that version
    if tested is None or version.partition("+")[0] == tested:
        return MachineFact(name, version)
    return MachineFact(name, version, "note", f"the tests ran with {tested}; a difference may come from here")
