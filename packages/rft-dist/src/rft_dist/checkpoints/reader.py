"""Reading checkpoints back: nothing is handed out before every byte of it was compared.

A checkpoint verifies when its manifest is whole, names the step of its directory, lists exactly
the files that are there, and each of them has the size and SHA-256 that it says. What does not
verify is moved aside under a `quarantine_` name, never removed, and reported as findings.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from rft_core.checkpoint_places import other_places
from rft_core.errors import CheckpointError
from rft_dist.checkpoint_format.file_operations import BLOCK_BYTES, QUARANTINE, Digest, digest_file, rename
from rft_dist.checkpoint_format.layout import (
    MANIFEST,
    MODEL,
    STATE,
    candidates,
    component_of,
    parse_step,
    quarantine_path,
    step_of,
)
from rft_dist.checkpoint_format.manifest import MAX_BYTES, FileEntry, Manifest, ManifestFault, parse_manifest
from rft_dist.checkpoint_format.resharding import BlockReader, table_of_files
from rft_dist.checkpoint_format.safetensors_pieces import DTYPES
from rft_dist.checkpoint_format.shards import ShardSink

ResultT = TypeVar("ResultT")
_NOT_A_FILE = (errno.ELOOP, errno.EISDIR, errno.EINVAL)  # a link, a directory, a device


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason why a checkpoint was not used."""

    path: Path
    """The checkpoint's directory, under the name that it had."""
    file: str
    """File inside it; empty where the whole directory is meant."""
    problem: str
    """What is wrong, such as "bytes 0-1048575, SHA-256 9f.. expected 41..", """
    first_byte: int | None = None
    last_byte: int | None = None
    """Range in which the damage lies, both ends included, where it is known."""
    is_damage: bool = True
    """False where nothing says that the content is wrong: it cannot be read just now, or is not ours."""
    quarantined_to: Path | None = None

    def __str__(self) -> str:
        moved = f"; kept as {self.quarantined_to}" if self.quarantined_to else ""
        return f"{self.path}: {self.file + ' ' if self.file else ''}{self.problem}{moved}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that verified when it was opened."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Optimizer steps done when it was saved."""
        return self.manifest.step

    @property
    def model_directory(self) -> Path:
        """A complete Hugging Face directory."""
        return self.path / MODEL

    def tensors(self, component: str, device: str = "cpu") -> dict[str, Tensor]:
        """The tensors of a component in full, whoever saved it; CheckpointError where it has none."""
        if component in self.manifest.sharded:
            return self._reading(lambda: self._full_tensors(component, device))
        path = self._file(component, ".safetensors")
        try:
            return load_file(path, device=device)
        except (OSError, SafetensorError) as error:
            raise _changed_since(path, str(error)) from error

    def blocks(self, component: str) -> BlockReader:
        """The blocks of a component, for a rank that wants other ones than those that were saved."""
        if component in self.manifest.sharded:
            return BlockReader(self.path, self.manifest.sharded[component])
        file = self._file(component, ".safetensors").relative_to(self.path).as_posix()
        return BlockReader(self.path, table_of_files(self.path, [file]))

    def load(self, component: str, sink: ShardSink) -> int:
        """Put the blocks of a component that the sink wants, and return their number.

        Only those are read. Raises CheckpointError, and puts nothing, where a tensor is missing or
        has another shape or dtype.
        """
        return self._reading(lambda: self.blocks(component).load(sink))

    def component(self, name: str) -> StoredTensors:
        """The tensors of a component, for the part of a run that is restored from it."""
        return StoredTensors(self, name)

    def records(self, component: str) -> Any:
        """The JSON value of a component; CheckpointError where it has none."""
        path = self._file(component, ".json")
        try:
            return json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise _changed_since(path, str(error)) from error

    def has_records(self, component: str) -> bool:
        """Return whether the checkpoint has a JSON record of a component (`records`)."""
        return self._lists(f"{STATE}/{component}.json")

    def require_components(self, registered: Collection[str]) -> None:
        """Raise CheckpointError naming what is missing or unexpected, unless the saved set is `registered`."""
        require_equal_components(registered, self.manifest.components, where=str(self.path))

    def _full_tensors(self, component: str, device: str) -> dict[str, Tensor]:
        reader = self.blocks(component)
        return {name: reader.full_tensor(name).to(device) for name in reader.table}

    def _reading(self, load: Callable[[], ResultT]) -> ResultT:
        try:
            return load()
        except (OSError, SafetensorError) as error:
            raise _changed_since(self.path / STATE / "*.safetensors", str(error)) from error

    def _lists(self, file: str) -> bool:
        return any(entry.path == file for entry in self.manifest.files)

    def _file(self, component: str, suffix: str) -> Path:
        name = f"{STATE}/{component}{suffix}"
        if not self._lists(name):
            raise CheckpointError(
                code="checkpoint.component_missing",
                what=f"checkpoint {self.path} has no {name}; it holds {', '.join(self.manifest.components) or 'none'}",
                where=str(self.path / MANIFEST),
                why="a resumed run continues exactly only with every part of its state",
                do=f"resume with the version of the program that saved it: {self.manifest.metadata.get('versions')}",
            )
        return self.path / name


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The tensors of one component of a checkpoint (`StoredComponent`)."""

    checkpoint: Checkpoint
    component: str

    @property
    def names(self) -> Collection[str]:
        """Names of the tensors; CheckpointError where the checkpoint has none of this component."""
        return self.checkpoint.blocks(self.component).table.keys()

    def dtype_of(self, name: str) -> torch.dtype:
        """Type in which a tensor was saved."""
        return DTYPES[self.checkpoint.blocks(self.component).table[name].dtype]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors in full, see `Checkpoint.tensors`."""
        return self.checkpoint.tensors(self.component)

    def load(self, sink: ShardSink) -> None:
        """Write the shards that the sink requests, see `Checkpoint.load`."""
        self.checkpoint.load(self.component, sink)


@dataclass(frozen=True, slots=True)
class Search:
    """Result of a search for the newest usable checkpoint."""

    checkpoint: Checkpoint | None
    findings: tuple[Finding, ...]
    """Why newer ones were passed over."""


def require_equal_components(registered: Collection[str], saved: Collection[str], *, where: str) -> None:
    """Raise CheckpointError naming the difference, unless both sets are equal."""
    missing = sorted(set(registered) - set(saved))
    unexpected = sorted(set(saved) - set(registered))
    if missing or unexpected:
        raise CheckpointError(
            code="checkpoint.components_differ",
            what=f"components missing: {', '.join(missing) or 'none'}; unexpected: {', '.join(unexpected) or 'none'}",
            where=where,
            why="the saved set must equal the set that this run registered: what is left out cannot be restored",
            do=f"register {', '.join(unexpected)}" if unexpected else f"save {', '.join(missing)} too",
        )


def read_manifest(path: Path) -> Manifest:
    """The manifest of a directory, without looking at any other file.

    Raises FileNotFoundError where there is none, OSError where it cannot be read and
    ManifestFault where it cannot be believed.
    """
    file = path / MANIFEST
    # neither a link nor a pipe may stand in for the manifest
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as stream:
        # one byte more than allowed: a file that is larger shows itself, and is not read to its end
        content = stream.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ManifestFault(f"larger than {MAX_BYTES} bytes")
    return parse_manifest(content)


def inspect(path: Path, *, only: Collection[str] | None = None) -> tuple[Manifest | None, list[Finding]]:
    """Compare a directory with its manifest, every byte. No findings: it verifies.

    With `only`, names and sizes of all files are compared and the content of these.
    """
    try:
        manifest = read_manifest(path)
    except FileNotFoundError:
        return None, [Finding(path, MANIFEST, "is missing", is_damage=False)]
    except ManifestFault as fault:
        return None, [Finding(path, MANIFEST, str(fault), is_damage=fault.is_damage)]
    except OSError as error:
        return None, [_unreadable(path, MANIFEST, error)]
    findings = _compare_names(path, manifest)
    # names and sizes first: they cost no reading, and without all files there is nothing to compare
    return manifest, findings or inspect_files(path, manifest, only)


def inspect_files(path: Path, manifest: Manifest, only: Collection[str] | None = None) -> list[Finding]:
    """Compare the content of the manifest's files, all or those of `only`, with what it says of them."""
    entries = [entry for entry in manifest.files if only is None or entry.path in only]
    findings = [finding for entry in entries if (finding := _compare_content(path, entry))]
    # headers are parsed only after their bytes were found to be those that were written
    return findings or _compare_headers(path, entries)


def open_verified(path: Path) -> Checkpoint:
    """The checkpoint in directory `path`. Raises CheckpointError with the first finding unless it verifies."""
    manifest, findings = inspect(path)
    if findings or manifest is None:
        raise damaged(path, findings)
    return Checkpoint(path, manifest)


def damaged(path: Path, findings: list[Finding]) -> CheckpointError:
    """The error for a checkpoint that was asked for by name and does not verify."""
    first = findings[0]
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return CheckpointError(
        code="checkpoint.damaged",
        what=f"checkpoint {path} is damaged: {first.file} {first.problem}{more}",
        where=str(path / first.file),
        why="its bytes are not those that were saved, and training from other weights would give no error",
        state="nothing was loaded; the directory is as it was",
        do=f"resume from the folder, which takes the newest that verifies: {path.parent}",
    )


def newest_verified(directory: Path, *, run_id: str | None = None) -> Search:
    """The checkpoint saved last that verifies, walking back; damaged ones are moved to quarantine.

    With `run_id`, those of other runs are passed over untouched. A further folder of the run that is not there
    is a finding, since the checkpoint saved last may be in it.
    """
    absent = "is not there: checkpoints of this run that went to it cannot be found"
    findings = [Finding(place, "", absent, is_damage=False) for place in other_places(directory) if not place.is_dir()]
    for path in _newest_first(directory, run_id):
        manifest, problems = inspect(path)
        if manifest is not None and not problems:
            return Search(Checkpoint(path, manifest), tuple(findings))
        findings += quarantine(path, problems)
    return Search(None, tuple(findings))


def quarantine(path: Path, problems: list[Finding]) -> list[Finding]:
    """Move a damaged checkpoint aside, and give its findings with the new name.

    What only cannot be read just now, or has no manifest and so may be someone else's, stays. So
    does one on a file system that does not let it be renamed.
    """
    step = step_of(path)
    if step is None or not any(problem.is_damage for problem in problems):
        return problems
    target = quarantine_path(path, step)
    try:
        rename(QUARANTINE, path, target)
    except OSError as error:
        return [*problems, Finding(path, "", f"could not be moved to quarantine: {error.strerror}", is_damage=False)]
    return [replace(problem, quarantined_to=target) for problem in problems]


def _newest_first(directory: Path, run_id: str | None) -> list[Path]:
    """List checkpoints newest first by order of saving; an unreadable one counts as right after the steps below it."""
    ordered: list[tuple[float, int, Path]] = []
    latest = 0
    for step, path in sorted(candidates(directory)):
        try:
            manifest = read_manifest(path)
        except (OSError, ManifestFault):
            ordered.append((latest + 0.5, step, path))
            continue
        if run_id is None or manifest.run_id == run_id:
            ordered.append((manifest.sequence, step, path))
            latest = max(latest, manifest.sequence)
    return [path for _, _, path in sorted(ordered, reverse=True)]


def _compare_names(path: Path, manifest: Manifest) -> list[Finding]:
    claimed = step_of(path)
    if claimed is not None and claimed != manifest.step:
        return [Finding(path, MANIFEST, f"belongs to step {manifest.step}: this is another checkpoint's file")]
    try:
        present, odd = _walk(path)
    except OSError as error:
        return [_unreadable(path, "", error)]
    listed = {entry.path: entry.digest.size for entry in manifest.files}
    findings = [Finding(path, name, "is not a regular file") for name in odd]
    findings += [Finding(path, name, "is missing") for name in sorted(set(listed) - set(present))]
    findings += [Finding(path, name, "is not in the manifest") for name in sorted(set(present) - set(listed))]
    findings += [
        _size_differs(path, name, present[name], size)
        for name, size in listed.items()
        if name in present and present[name] != size
    ]
    in_state = {component_of(name) for name in listed if name.startswith(f"{STATE}/")}
    if in_state != set(manifest.components):
        findings.append(Finding(path, MANIFEST, "lists components and files that differ"))
    return findings


def _walk(path: Path, prefix: str = "") -> tuple[dict[str, int], list[str]]:
    """Size of every regular file but the manifest by relative name, and names of all that is no file or directory."""
    sizes: dict[str, int] = {}
    odd: list[str] = []
    with os.scandir(path) as entries:
        for entry in entries:
            name = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                below, odd_below = _walk(Path(entry.path), f"{name}/")
                sizes.update(below)
                odd += odd_below
            elif not entry.is_file(follow_symlinks=False):
                odd.append(name)
            elif name != MANIFEST:
                sizes[name] = entry.stat(follow_symlinks=False).st_size
    return sizes, sorted(odd)


def _compare_content(path: Path, entry: FileEntry) -> Finding | None:
    try:
        digest = digest_file(path / entry.path)
    except OSError as error:
        return _unreadable(path, entry.path, error)
    if digest == entry.digest:
        return None
    if digest.size != entry.digest.size:
        return _size_differs(path, entry.path, digest.size, entry.digest.size)
    first, last = _damaged_range(digest, entry.digest)
    problem = f"bytes {first}-{last}, SHA-256 {digest.sha256} expected {entry.digest.sha256}"
    return Finding(path, entry.path, problem, first, last)


def _damaged_range(digest: Digest, want: Digest) -> tuple[int, int]:
    pairs = zip(digest.crc32_blocks, want.crc32_blocks, strict=False)
    blocks = [index for index, (here, there) in enumerate(pairs) if here != there]
    # no CRC-32 differs though SHA-256 does: the place is not known any closer
    if not blocks:
        return 0, want.size - 1
    return blocks[0] * BLOCK_BYTES, min((blocks[-1] + 1) * BLOCK_BYTES, want.size) - 1


def _compare_headers(path: Path, entries: Collection[FileEntry]) -> list[Finding]:
    findings: list[Finding] = []
    for entry in entries:
        if not entry.path.endswith(".safetensors"):
            continue
        try:
            with safe_open(path / entry.path, framework="pt") as stream:
                stream.keys()
        except (OSError, SafetensorError) as error:
            findings.append(Finding(path, entry.path, f"has an invalid header: {error}"))
    return findings


def _size_differs(path: Path, name: str, size: int, want: int) -> Finding:
    problem = f"has {size} bytes, expected {want}"
    return Finding(path, name, problem, min(size, want), max(size, want) - 1)


def _unreadable(path: Path, name: str, error: OSError) -> Finding:
    problem = f"cannot be read: {error.strerror or error}"
    return Finding(path, name, problem, is_damage=error.errno in _NOT_A_FILE)


def _changed_since(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        code="checkpoint.changed_since_verified",
        what=f"{path} cannot be read although it verified: {reason[:300]}",
        where=str(path),
        why="the file changed after it was compared with its manifest",
        do=f"resume from the folder again: {path.parents[2]}",
    )


def is_checkpoint_directory(path: Path) -> bool:
    """Return whether `path` is a directory with a manifest, or with the name of a published checkpoint."""
    return path.is_dir() and (parse_step(path.name) is not None or (path / MANIFEST).is_file())
