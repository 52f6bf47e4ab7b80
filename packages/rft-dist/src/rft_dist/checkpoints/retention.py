"""Retention: selection and removal of old checkpoints.

Removal happens after a save has been published and verified, never before: the folder holds one
checkpoint more than its limit while a save is under way. A checkpoint is renamed before its files
are unlinked, so that one that is half removed is never taken for a whole one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rft_core.errors import OptionsError
from rft_dist.checkpoint_format.file_operations import RETIRE, remove_tree, rename, sync_directory
from rft_dist.checkpoint_format.layout import Leftover, dead_name, leftovers, run_tag, step_name
from rft_dist.checkpoints.writer import restore_displaced


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Limits that hold after each save, as far as protected checkpoints allow."""

    keep_last: int | None
    """Checkpoints to keep, at least 1; None for all."""
    keep_bytes: int | None
    """Bytes that they may take together, at least 1; None for no limit."""

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.keep_last), ("keep_bytes", self.keep_bytes)):
            if value is not None and value < 1:
                raise OptionsError(
                    code="checkpoint.bad_limit",
                    what=f"{name} = {value}",
                    where=f"{name} of the checkpoint store",
                    why="the newest checkpoint is always kept: a limit is at least 1, or None",
                    do=f"{name} = 1",
                )


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint as retention sees it."""

    step: int
    sequence: int
    """Order of saving."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Removal:
    """A checkpoint that goes, and why."""

    step: int
    num_bytes: int
    reason: str


def plan_removals(stored: Sequence[Stored], policy: RetentionPolicy, protected: Mapping[int, str]) -> list[Removal]:
    """The checkpoints to remove, oldest first.

    The one saved last stays, and so do the `protected` (step -> why). Both count towards the
    limits. The others stay from newest to oldest as long as the limits hold; from the first that
    does not fit, all older ones go.
    """
    newest_first = sorted(stored, key=lambda entry: (entry.sequence, entry.step), reverse=True)
    kept = [entry for index, entry in enumerate(newest_first) if index == 0 or entry.step in protected]
    num_kept, num_bytes = len(kept), sum(entry.num_bytes for entry in kept)
    reason = ""
    removals: list[Removal] = []
    for entry in newest_first:
        if entry in kept:
            continue
        # the first reason holds for all older ones, small ones that would fit included: what is kept has no gaps
        reason = reason or _exceeded(policy, num_kept + 1, num_bytes + entry.num_bytes)
        if reason:
            removals.append(Removal(entry.step, entry.num_bytes, reason))
        else:
            num_kept, num_bytes = num_kept + 1, num_bytes + entry.num_bytes
    return removals[::-1]


def remove_checkpoint(directory: Path, step: int, run_id: str) -> None:
    """Rename one checkpoint to a `dead_` name and unlink it. Raises OSError."""
    dead = directory / dead_name(step, run_id)
    # an earlier removal of the same step was refused half way
    if os.path.lexists(dead):
        remove_tree(dead)
    # renamed before its files are unlinked: half removed, it is never taken for a whole one
    rename(RETIRE, directory / step_name(step), dead)
    remove_tree(dead)
    sync_directory(directory)


def sweep(directory: Path, run_id: str) -> None:
    """Finish what a killed process of this run had begun: staged, retired and displaced directories.

    Directories of other runs, and of a process that still lives on this machine, stay. Raises
    OSError.
    """
    for leftover in leftovers(directory):
        if leftover.tag != run_tag(run_id) or _is_alive(leftover.pid):
            continue
        if leftover.is_replaced:
            restore_displaced(leftover.path, directory / step_name(leftover.step))
        else:
            _remove(leftover)


def _remove(leftover: Leftover) -> None:
    remove_tree(leftover.path)
    sync_directory(leftover.path.parent)


def _is_alive(pid: int) -> bool:
    """Return whether another process has this pid; this process is in no save while it sweeps."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it lives, as another user's
        return True
    return True


def _exceeded(policy: RetentionPolicy, num: int, num_bytes: int) -> str:
    if policy.keep_last is not None and num > policy.keep_last:
        return f"keep_last = {policy.keep_last}"
    if policy.keep_bytes is not None and num_bytes > policy.keep_bytes:
        return f"keep_bytes = {policy.keep_bytes}"
    return ""
