"""The manifest: what a checkpoint holds, byte for byte.

A file `manifest.json` of canonical JSON (sorted keys, no spaces) with two keys: `manifest`, the
content, and `sha256`, the hash of the content's canonical bytes. A manifest of which any byte
changed is not read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rft_dist.checkpoint_format.file_operations import Digest
from rft_dist.checkpoint_format.layout import MANIFEST, is_component_name
from rft_dist.checkpoint_format.resharding import StoredTensor, fault_of, from_json, to_json

FORMAT_VERSION = 1
"""Every component that is tensors is one file, whole."""
SHARDED_VERSION = 2
"""Some components are in files of several ranks; the manifest has the table of their blocks."""
MAX_BYTES = 256 * 2**20
"""A larger manifest is refused unread."""

_TYPE_NAMES = {str: "text", int: "an integer", list: "a list", dict: "an object"}


class ManifestFault(ValueError):
    """The manifest cannot be believed; the text says why."""

    is_damage = True


class UnknownVersion(ManifestFault):
    """The manifest is whole and of a form that this program does not know."""

    is_damage = False


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    path: str
    """Relative to the checkpoint's directory, with forward slashes."""
    digest: Digest


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of one checkpoint: run, step, components, files, metadata and sharded tensors."""

    run_id: str
    step: int
    parent_step: int | None
    """Step that this one continued from: the last saved or opened by the same process."""
    sequence: int
    """Counts the saves into one folder. The newest checkpoint is the one saved last, which after
    going back to an earlier one need not be that of the highest step."""
    components: tuple[str, ...]
    """Names of the parts of the run's state, sorted; the saved set equals the registered one."""
    files: tuple[FileEntry, ...]
    """Every file but the manifest, sorted by path."""
    metadata: Mapping[str, Any]
    """What the run adds: hashes of configuration and data, versions, episode, best score."""
    created: str
    """UTC, ISO 8601."""
    sharded: Mapping[str, Mapping[str, StoredTensor]] = field(default_factory=dict)
    """Component -> name -> where its blocks are, for components in files of several ranks."""

    @property
    def format_version(self) -> int:
        """The oldest form that can say it."""
        return SHARDED_VERSION if self.sharded else FORMAT_VERSION

    @property
    def num_bytes(self) -> int:
        """Sum of the sizes of all files but the manifest."""
        return sum(entry.digest.size for entry in self.files)

    def to_bytes(self) -> bytes:
        """Return the bytes of the manifest file."""
        body: dict[str, Any] = {
            "components": list(self.components),
            "created": self.created,
            "files": [entry_to_json(entry) for entry in self.files],
            "format_version": self.format_version,
            "metadata": dict(self.metadata),
            "parent_step": self.parent_step,
            "run_id": self.run_id,
            "sequence": self.sequence,
            "step": self.step,
        }
        # left out where it is empty: format version 1 has no such key
        if self.sharded:
            body["sharded"] = {component: to_json(table) for component, table in self.sharded.items()}
        return canonical_json({"manifest": body, "sha256": hashlib.sha256(canonical_json(body)).hexdigest()}) + b"\n"


def canonical_json(value: object) -> bytes:
    """The one encoding of a JSON value: keys sorted, no spaces, ASCII, no NaN.

    Raises TypeError for what JSON cannot hold, keys that are no text included, and ValueError for
    a number that is not finite.
    """
    _require_text_keys(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def parse_manifest(content: bytes) -> Manifest:
    """The manifest that `content` encodes. Raises ManifestFault for any deviation from its form."""
    try:
        value = json.loads(content.decode("ascii"))
        # encoded again and compared: bytes that JSON ignores, such as spaces, are noticed too
        expected = canonical_json(value) + b"\n"
    except (ValueError, TypeError, RecursionError) as error:
        raise ManifestFault(f"not readable as JSON: {error}") from error
    if expected != content or not isinstance(value, dict) or set(value) != {"manifest", "sha256"}:
        raise ManifestFault("not in canonical form")
    body = value["manifest"]
    digest = hashlib.sha256(canonical_json(body)).hexdigest()
    if digest != value["sha256"]:
        raise ManifestFault(f"its content has SHA-256 {digest}, expected {value['sha256']}")
    return _from_body(body)


def _from_body(body: Any) -> Manifest:
    version = body.get("format_version") if isinstance(body, dict) else None
    # not a comparison alone, for which True and 1.0 are 1
    if type(version) is not int or version < FORMAT_VERSION:
        raise ManifestFault(f"format version {version} does not exist")
    if version > SHARDED_VERSION:
        raise UnknownVersion(f"format version {version}, this program reads up to {SHARDED_VERSION}")
    parent = body.get("parent_step")
    if parent is not None and type(parent) is not int:
        raise ManifestFault("parent_step is not an integer")
    components = tuple(_typed(body, "components", list))
    if not all(isinstance(name, str) and is_component_name(name) for name in components):
        raise ManifestFault("a component name is not allowed")
    files = tuple(entry_from_json(entry) for entry in _typed(body, "files", list))
    paths = [entry.path for entry in files]
    if paths != sorted(set(paths)):
        raise ManifestFault("files are not sorted or not unique")
    # on some file systems two such names are one file
    if len({path.casefold() for path in paths}) < len(paths):
        raise ManifestFault("names of two files differ in case alone")
    return Manifest(
        run_id=_typed(body, "run_id", str),
        step=_natural(body, "step"),
        parent_step=parent,
        sequence=_natural(body, "sequence"),
        components=components,
        files=files,
        metadata=_typed(body, "metadata", dict),
        created=_typed(body, "created", str),
        sharded=_tables(body, version, components, {entry.path: entry.digest.size for entry in files}),
    )


def _tables(
    body: Mapping[str, Any], version: int, components: tuple[str, ...], sizes: Mapping[str, int]
) -> dict[str, dict[str, StoredTensor]]:
    if version == FORMAT_VERSION:
        return {}
    try:
        tables = {name: from_json(table) for name, table in _typed(body, "sharded", dict).items()}
    except ValueError as error:
        raise ManifestFault(str(error)) from error
    used = {block.file for table in tables.values() for entry in table.values() for block in entry.blocks}
    if not tables or not set(tables) <= set(components) or not used <= set(sizes):
        raise ManifestFault("its blocks are of components or files that it does not list")
    fault = next((fault for table in tables.values() if (fault := fault_of(table, sizes))), "")
    if fault:
        raise ManifestFault(fault)
    return tables


def entry_to_json(entry: FileEntry) -> dict[str, Any]:
    """A file's entry as the manifest holds it."""
    return {
        "path": entry.path,
        "size": entry.digest.size,
        "sha256": entry.digest.sha256,
        "crc32_blocks": list(entry.digest.crc32_blocks),
    }


def entry_from_json(entry: Any) -> FileEntry:
    """The entry that `entry_to_json` gave. Raises ManifestFault for any other form."""
    if not isinstance(entry, dict):
        raise ManifestFault("a file entry is not an object")
    path = _typed(entry, "path", str)
    if not is_safe_path(path):
        raise ManifestFault(f"file name {path!r} leaves the directory or is reserved")
    blocks = _typed(entry, "crc32_blocks", list)
    if not all(type(block) is int for block in blocks):
        raise ManifestFault(f"crc32_blocks of {path} are not integers")
    return FileEntry(path, Digest(_natural(entry, "size"), _typed(entry, "sha256", str), tuple(blocks)))


def is_safe_path(path: str) -> bool:
    """Return whether `path` is relative, stays inside its directory, and is not the manifest itself."""
    parts = path.split("/")
    plain = all(part not in ("", ".", "..") for part in parts)
    return plain and "\0" not in path and "\\" not in path and path != MANIFEST


def _typed(body: Mapping[str, Any], key: str, kind: type) -> Any:
    value = body.get(key)
    # not isinstance, for which True is an integer
    if type(value) is not kind:
        raise ManifestFault(f"{key} is not {_TYPE_NAMES[kind]}")
    return value


def _natural(body: Mapping[str, Any], key: str) -> int:
    value = _typed(body, key, int)
    if value < 0:
        raise ManifestFault(f"{key} is negative")
    return value


def _require_text_keys(value: object) -> None:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is no text")
            _require_text_keys(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            _require_text_keys(entry)
