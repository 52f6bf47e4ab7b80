"""The record of a stage: SHA-256 of its options, of the files that it read, and of those that it wrote."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from rft_core.durable_files import replace_text
from rft_genrec import __version__
from rft_genrec.pipeline.stages import Stage, final_model

_FOLDER = "stages"


@dataclass(frozen=True, slots=True)
class StageManifest:
    """Record of the options and files that a stage was made from, and of those that it made."""

    version: str
    words: tuple[str, ...]
    """Its command line, the places not filled."""
    reads: Mapping[str, str]
    """SHA-256 of every file that it reads, by its name."""
    writes: Mapping[str, str] = field(default_factory=dict[str, str])
    """SHA-256 of every file that it has written; empty while it has not ended."""

    def same_as(self, other: StageManifest) -> bool:
        """Return whether two stages are made from the same."""
        return (self.version, self.words, self.reads) == (other.version, other.words, other.reads)

    def difference(self, other: StageManifest) -> str:
        """Return what has changed between an earlier manifest, `other`, and this one."""
        if self.words != other.words:
            return "its options have changed"
        changed = sorted(name for name in {*self.reads, *other.reads} if self.reads.get(name) != other.reads.get(name))
        return f"{changed[0]} has changed" if changed else f"it was made by rft-genrec {other.version}"


def manifest_of(stage: Stage, run: Path) -> StageManifest:
    """Return the manifest of a stage as it would run now."""
    reads = {_name(path, run): digest(path) for path in files_below(run, stage.reads)}
    for place in stage.outside:
        reads |= {str(path): digest(path) for path in _all_files(place)}
    return StageManifest(__version__, stage.words, reads)


def written(stage: Stage, run: Path) -> dict[str, str]:
    """Return the SHA-256 of the files that a stage has written, by their names."""
    return {_name(path, run): digest(path) for path in files_below(run, stage.writes)}


def files_below(run: Path, patterns: Iterable[str]) -> list[Path]:
    """Return the files that patterns match; of a run with several checkpoints those of the newest."""
    found: list[Path] = []
    for pattern in patterns:
        trained, in_checkpoints, _ = pattern.partition("/checkpoints/")
        if in_checkpoints:
            # a save that the disk of the run refused is in another folder, where no pattern below the run finds it
            model = final_model(run / trained)
            matches = sorted(path for path in model.glob("*") if path.is_file())
        else:
            matches = sorted(path for path in run.glob(pattern) if path.is_file())
        found += [path for path in matches if path not in found]
    return found


def stored(run: Path, name: str) -> StageManifest | None:
    """Return the manifest that a stage has left; None where there is none that can be read."""
    try:
        fields: Any = json.loads((run / _FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        known = cast("dict[str, Any]", fields)
        return StageManifest(known["version"], tuple(known["words"]), dict(known["reads"]), dict(known["writes"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(run: Path, name: str, manifest: StageManifest) -> None:
    """Write the manifest of a stage, whole or not at all."""
    folder = run / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / f"{name}.json", json.dumps(asdict(manifest), indent=2) + "\n")


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _all_files(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
    yield from sorted(path for path in place.rglob("*") if path.is_file())


def _name(path: Path, run: Path) -> str:
    return str(path.relative_to(run) if path.is_relative_to(run) else path)
