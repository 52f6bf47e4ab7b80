"""Settings of a start whose names of the Hub are fixed to commits, and then found as directories of this machine."""

from __future__ import annotations

import logging
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rft.hub.hub_names import HubName, model_name, rewritten, with_directories
from rft.resolved import Resolved, flat, with_values

_LOG = logging.getLogger(__name__)
S = TypeVar("S")


def pinned(resolved: Resolved[S]) -> Resolved[S]:
    """Return the settings with a commit hash in every name of the Hub; its text as a file too.

    Raises:
        OptionsError, ServiceError, DataError: a name is unknown, refused, or cannot be asked for.
    """
    commits: dict[tuple[str, str, str], str] = {}

    def with_commit(name: HubName, setting: str) -> str:
        key = (name.kind, name.repo, name.revision)
        if key not in commits:
            commits[key] = _commit(name, f"--{setting}")
        return str(name.at(commits[key]))

    changed = rewritten(resolved.values, with_commit)
    if not changed:
        return resolved
    text = _with_lines(resolved.config_yaml, resolved.values, changed)
    return replace(resolved.with_values(changed), config_yaml=text)


def with_local_models(resolved: Resolved[S], *, weights: bool = True) -> Resolved[S]:
    """Return the settings with the directory of every model that they name; it is downloaded where it is not here.

    `weights=False`: without safetensors, for what reads configurations alone.
    """

    def directory(name: HubName, setting: str) -> str:
        return local_model(name, f"--{setting}", weights=weights)

    changed = with_directories(resolved.values, directory)
    return resolved.with_values(changed) if changed else resolved


def with_model_directories(settings: S) -> S:
    """Return the nested settings of a command with the directory of every model that they name, as it is now."""

    def directory(name: HubName, setting: str) -> str:
        return local_model(name, f"--{setting}")

    changed = with_directories(flat(settings), directory)
    return with_values(settings, changed) if changed else settings


def local_settings(resolved: Resolved[S]) -> Resolved[S]:
    """Return the settings as the parts of a program read them: data at their commits, models as directories."""
    return with_local_models(pinned(resolved))


@dataclass(frozen=True, slots=True)
class ListedWeights:
    """Weight files of a model of the Hub that a start would download."""

    name: str
    directory: Path
    sizes: Mapping[str, int]
    """Bytes by file."""

    def __str__(self) -> str:
        files = f"{len(self.sizes)} weight file{'s' if len(self.sizes) > 1 else ''}"
        return (
            f"{files} of {self.name}, {sum(self.sizes.values()) / 1e9:,.3f} GB, listed and not downloaded: "
            "whether they are whole and fit config.json shows at the start"
        )


@contextmanager
def without_weights(resolved: Resolved[S]) -> Generator[tuple[Resolved[S], list[ListedWeights]]]:
    """Give the settings as `local_settings` does, and the weights that were not downloaded for that: none are.

    While the block runs, a directory is checked as if it held the weights that are listed.

    Raises:
        OptionsError, ServiceError, DataError: as a start would.
    """
    from rft.hub.model_files import listed_model
    from rft_models.files.directories import weights_by_list

    listed: dict[str, ListedWeights] = {}

    def directory(name: HubName, setting: str) -> str:
        folder, sizes = listed_model(name, f"--{setting}")
        if sizes:
            listed[str(name)] = ListedWeights(str(name), folder, sizes)
        return str(folder)

    # every name has its commit then
    resolved = pinned(resolved)
    changed = with_directories(resolved.values, directory)
    with weights_by_list({weights.directory: weights.sizes for weights in listed.values()}):
        yield (resolved.with_values(changed) if changed else resolved), list(listed.values())


def local_model(name: HubName, flag: str, *, weights: bool = True) -> str:
    """Return the directory of a model of the Hub."""
    from rft.hub.model_files import model_directory

    commit = name.commit or _commit(name, flag)
    return str(model_directory(name.at(commit), flag, weights=weights))


def local_directory(text: str, flag: str) -> str:
    """Return the directory that a setting names: a path as it is, a name of the Hub downloaded."""
    name = model_name(text)
    return local_model(name, flag) if name is not None else text


def _commit(name: HubName, flag: str) -> str:
    from rft.hub.download import ASIDE, commit_of

    commit = commit_of(name, flag)
    if not name.commit:
        _LOG.info("%s is at commit %s", name, commit, extra=ASIDE)
    return commit


def _with_lines(text: str, before: Mapping[str, Any], changed: Mapping[str, str]) -> str:
    """Return a config.yaml with other values of some settings."""
    for name, value in changed.items():
        line = re.compile(rf"^{re.escape(name)}: .*$", re.MULTILINE)
        old = str(before[name])
        text = line.sub(lambda found, old=old, value=value: found[0].replace(old, value, 1), text)
    return text
