"""Resolution of a `--ckpt_path` value to one verified checkpoint.

Accepted: a run's directory, its `checkpoints` folder, `step_000100` (or `step_100`), `episode_5`,
and any file or directory inside a checkpoint. What names one checkpoint gives that one or an
error; what names a folder gives the newest that verifies. Nothing found is an error, never a
fresh start.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from rft_core.errors import CheckpointError
from rft_dist.checkpoint_format.layout import CHECKPOINTS, published
from rft_dist.checkpoint_format.manifest import ManifestFault
from rft_dist.checkpoints.reader import (
    Checkpoint,
    Finding,
    inspect,
    is_checkpoint_directory,
    newest_verified,
    open_verified,
    read_manifest,
)

_STEP = re.compile(r"(?:global_)?step_?(\d+)")
_NEVER_FRESH = "a resume that was asked for never becomes a fresh start"
_EPISODE = re.compile(r"episode_?(\d+)")


@dataclass(frozen=True, slots=True)
class LocatedCheckpoint:
    """The checkpoint that a path stands for."""

    checkpoint: Checkpoint
    findings: tuple[Finding, ...]
    """Newer ones in the folder that did not verify and were moved to quarantine."""


def resolve_checkpoint(path: Path, *, asked_by: str = "--ckpt_path", origin: str = "command line") -> LocatedCheckpoint:
    """Return the verified checkpoint that `path` stands for.

    `asked_by` and `origin` are the setting that held the path and where its value came from, for
    messages. Raises CheckpointError where there is nothing, or where the one that was named does
    not verify.
    """
    inside = _enclosing_checkpoint(path)
    if inside is not None:
        return LocatedCheckpoint(open_verified(inside), ())
    named = _by_name(path)
    if named is not None:
        return LocatedCheckpoint(open_verified(named), ())
    findings: list[Finding] = []
    for folder in (path, path / CHECKPOINTS):
        if published(folder):
            search = newest_verified(folder)
            findings += search.findings
            if search.checkpoint is not None:
                return LocatedCheckpoint(search.checkpoint, tuple(findings))
    raise _nothing_found(path, asked_by, origin, findings)


def unverified_checkpoint(path: Path) -> Path | None:
    """Return the directory that `resolve_checkpoint` would verify first; None where there is none. Nothing is moved."""
    named = _enclosing_checkpoint(path) or _by_name(path)
    if named is not None:
        return named
    for folder in (path, path / CHECKPOINTS):
        found: list[tuple[int, Path]] = []
        for candidate in published(folder).values():
            try:
                found.append((read_manifest(candidate).sequence, candidate))
            except (OSError, ManifestFault):
                continue  # it would not verify
        if found:
            return max(found)[1]
    return None


def _enclosing_checkpoint(path: Path) -> Path | None:
    """`path` itself or the nearest directory above it that is a checkpoint."""
    if not path.exists():
        return None
    absolute = path.absolute()
    for candidate in (absolute, *absolute.parents):
        if is_checkpoint_directory(candidate):
            return candidate
    return None


def _by_name(path: Path) -> Path | None:
    """The checkpoint that the last part of `path` names by its step or episode, in the folder above it."""
    folders = (path.parent, path.parent / CHECKPOINTS)
    step, episode = _STEP.fullmatch(path.name), _EPISODE.fullmatch(path.name)
    for folder in folders:
        paths = published(folder)
        if step and int(step[1]) in paths:
            return paths[int(step[1])]
        if episode:
            last = _last_of_episode(paths, int(episode[1]))
            if last is not None:
                return last
    return None


def _last_of_episode(paths: dict[int, Path], episode: int) -> Path | None:
    """The highest step whose metadata say this episode."""
    for _, path in sorted(paths.items(), reverse=True):
        try:
            manifest = read_manifest(path)
        except (OSError, ManifestFault):
            continue
        if manifest.metadata.get("episode") == episode:
            return path
    return None


def _nothing_found(path: Path, asked_by: str, origin: str, findings: list[Finding]) -> CheckpointError:
    nearest = _nearest_valid(path)
    is_verb = asked_by.startswith("rft-train")  # rft-train resume, rft-train eval: there is no flag to leave out
    why = "a run or a checkpoint that verifies is needed" if is_verb else _NEVER_FRESH
    if findings:
        why = f"none of those in it verifies: {findings[0]}; {why}"
    return CheckpointError(
        code="checkpoint.nothing_to_resume",
        what=f"nothing to resume at {path} (asked by {asked_by} from {origin})",
        where=_what_is_there(path),
        why=why if is_verb else f"{why}: a fresh start needs --load_checkpoint left out",
        state="nothing was started" + (f"; nearest valid: step {nearest.step} at {nearest.path}" if nearest else ""),
        do=_remedy(nearest, asked_by, is_verb=is_verb),
    )


def _remedy(nearest: Checkpoint | None, asked_by: str, *, is_verb: bool) -> str:
    if nearest is None:
        return "rft-train runs" if is_verb else "start without --load_checkpoint"
    return f"{asked_by if is_verb else '--ckpt_path'} {nearest.path}"


def _what_is_there(path: Path) -> str:
    existing = path.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        return f"{existing} is a file that belongs to no checkpoint"
    names = sorted(entry.name for entry in os.scandir(existing))
    listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    begins = "" if existing == path.absolute() else f"{path} does not exist; "
    return f"{begins}{existing} holds {listed or 'nothing'}"


def _nearest_valid(path: Path) -> Checkpoint | None:
    """A checkpoint that verifies, at most two directories above, nearest to the step that was asked for."""
    match = _STEP.fullmatch(path.name)
    absolute = path.absolute()
    for folder in [absolute, *list(absolute.parents)[:2]]:
        paths = {**published(folder), **published(folder / CHECKPOINTS)}
        wanted = int(match[1]) if match else max(paths, default=0)
        for step in sorted(paths, key=lambda step: abs(step - wanted)):
            # verified, since the message offers it to resume from
            manifest, problems = inspect(paths[step])
            if manifest is not None and not problems:
                return Checkpoint(paths[step], manifest)
    return None
