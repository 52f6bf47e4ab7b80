"""The record of a run on disk: identity.json in its directory, and the copy in every checkpoint's manifest."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.identity.record import Identity, RecordFault, checked, identity_from_json, with_checksum
from rft.resolved import Resolved
from rft_core.durable_files import replace_text
from rft_core.errors import CheckpointError
from rft_dist.checkpoint_format.layout import CHECKPOINTS, published

IDENTITY, CONFIG = "identity.json", "config.yaml"
MANIFEST_KEY = "identity"
"""Where a manifest's metadata have the record."""
_LARGEST = 16 * 2**20


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """The record of a run, read back."""

    identity: Identity
    config_sha256: str
    """Of config.yaml as the program wrote it last."""
    config: str | None
    """That text; None where the record is a checkpoint's copy."""
    source: Path
    """The file that it was read from."""

    def config_is(self, text: bytes) -> bool:
        """Return whether `text` is config.yaml as the program wrote it."""
        return hashlib.sha256(text).hexdigest() == self.config_sha256


def read_record(run: Path) -> StoredRecord | None:
    """Read the record of a run, or the newest copy in its checkpoints where it has no file; None where both lack.

    Raises:
        CheckpointError: identity.json is damaged, or cannot be read.
    """
    file = run / IDENTITY
    if not file.is_file():
        return _of_checkpoints(run)
    with reading(
        file,
        code="identity.damaged",
        why="it records what decides the result of the run, and was cut off, damaged or edited",
        then="resume again: every checkpoint has a copy",
    ):
        if file.stat().st_size > _LARGEST:
            raise RecordFault(f"it has more than {_LARGEST} bytes")
        body = checked(json.loads(file.read_bytes().decode("utf-8")))
        config = str(body.pop("config", ""))
        return StoredRecord(identity_from_json(body), _sha256(config), config, file)


@contextmanager
def reading(file: Path, *, code: str, why: str, then: str) -> Generator[None]:
    """Raise `CheckpointError` where a run's JSON file cannot be read; the remedy moves it aside, and does `then`."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            code=code,
            what=f"{file} cannot be read: {error}",
            where=str(file),
            why=why,
            do=f"mv {shlex.quote(str(file))} {shlex.quote(f'{file}.damaged')}, then {then}",
        ) from error


def write_record(run: Path, identity: Identity, config: str) -> None:
    """Write the record, and config.yaml where it is another text; each file is replaced at once.

    The record comes first: after a kill between the two, the next resume finds in it what config.yaml lacks.
    """
    record = with_checksum({**identity.as_json(), "config": config})
    replace_text(run / IDENTITY, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    if config_bytes(run) != config.encode():
        replace_text(run / CONFIG, config)


def restore_config(run: Path, recorded: StoredRecord) -> bool:
    """Write config.yaml again where it is not there and the record holds it; return whether it was written."""
    if recorded.config is None or (run / CONFIG).exists():
        return False
    replace_text(run / CONFIG, recorded.config)
    return True


def manifest_entries(identity: Identity, config: str) -> dict[str, Any]:
    """Return what the manifest of a checkpoint holds of a run's identity."""
    return {
        "config_sha256": _sha256(config),
        "identity_sha256": identity.sha256,
        MANIFEST_KEY: identity.as_json(),
    }


def config_bytes(run: Path) -> bytes | None:
    """Return the bytes of config.yaml; None where it is not there or cannot be read."""
    try:
        return (run / CONFIG).read_bytes()
    except OSError:
        return None


def config_with(text: str, resolved: Resolved[Any], names: Iterable[str], step: int) -> str:
    """The text of a config.yaml with the present values of these settings, each with its origin and step."""
    lines = text.splitlines()
    rendered = resolved.config_yaml.splitlines()
    for name in names:
        line = next((line for line in rendered if line.startswith(f"{name}:")), None)
        if line is None:
            continue
        line = f"{line}, at step {step}"
        # a setting without a value has a comment in the place of its line
        place = next((n for n, old in enumerate(lines) if re.match(rf"(# )?{re.escape(name)}:", old)), None)
        if place is None:
            lines.append(line)
        else:
            lines[place] = line
    return "\n".join(lines) + "\n"


def _of_checkpoints(run: Path) -> StoredRecord | None:
    """Return the copy in the checkpoint that was saved last, of those that have one."""
    # here, so that `rft-train resume --help` does not wait for torch
    from rft_dist.checkpoint_format.manifest import ManifestFault
    from rft_dist.checkpoints.reader import read_manifest

    found: list[tuple[int, StoredRecord]] = []
    for path in published(run / CHECKPOINTS).values():
        try:
            manifest = read_manifest(path)
            identity = identity_from_json(manifest.metadata.get(MANIFEST_KEY))
        except (OSError, ManifestFault, RecordFault):
            continue  # saved by a version without records, or damaged, which the search for a checkpoint tells
        config = str(manifest.metadata.get("config_sha256", ""))
        found.append((manifest.sequence, StoredRecord(identity, config, None, path / "manifest.json")))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
