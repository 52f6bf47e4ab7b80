"""The record of what decides a run's result, and of every change of it, with its form as JSON. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from rft.identity.sorting import decides
from rft_core.secrets import scrub_text

FORM = 1


class RecordFault(ValueError):
    """The record cannot be believed; the text says why."""


@dataclass(frozen=True, slots=True)
class RecordedSetting:
    """The value of a setting, and where it came from."""

    value: object
    """As JSON: text, number, boolean, null or a list of them."""
    origin: str


@dataclass(frozen=True, slots=True)
class Content:
    """Hash of what a file, a directory, rows or code hold."""

    digest: str
    covers: str
    """What the digest is of, for people: "reward.py and 1 file that it imports"."""
    place: str = ""
    """Where it was found; no part of the identity, so that files may be moved."""
    count: int = 0
    """Number of rows, where it is rows."""
    scheme: int = 0
    """Number of the way in which rows were hashed; 0 for what is no rows, and for rows of versions before numbers."""


@dataclass(frozen=True, slots=True)
class Change:
    """A value that is another one from a step on."""

    step: int
    """Steps that were trained before it."""
    name: str
    before: object
    after: object
    origin: str
    """Who asked for it: the command line, or --accept_changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """All that decides the result of a run, and what else its start was given."""

    command: str
    settings: Mapping[str, RecordedSetting]
    contents: Mapping[str, Content]
    versions: Mapping[str, str]
    """Python and the packages that compute something."""
    machine: Mapping[str, object] = field(default_factory=dict[str, object])
    """Device and number of ranks: recorded, not compared."""
    changes: tuple[Change, ...] = ()

    @property
    def sha256(self) -> str:
        """Hash of what decides the result: without places, origins and settings that are free."""
        deciding = {
            "command": self.command,
            "settings": {name: setting.value for name, setting in self.settings.items() if decides(name)},
            "contents": {name: content.digest for name, content in self.contents.items()},
            "versions": dict(self.versions),
        }
        return _sha256(deciding)

    def as_json(self) -> dict[str, Any]:
        """Return the record as JSON."""
        return {
            "form": FORM,
            "command": self.command,
            "identity_sha256": self.sha256,
            "settings": {name: asdict(setting) for name, setting in sorted(self.settings.items())},
            "contents": {name: asdict(content) for name, content in sorted(self.contents.items())},
            "versions": dict(self.versions),
            "machine": dict(self.machine),
            "changes": [asdict(change) for change in self.changes],
        }


def identity_from_json(value: object) -> Identity:
    """The identity that `Identity.as_json` gave.

    Raises:
        RecordFault: another form, or one of a later version of the program.
    """
    body = _object(value, "the record")
    if body.get("form") != FORM:
        raise RecordFault(f"it has form {body.get('form')!r}, this program reads {FORM}")
    try:
        return Identity(
            command=str(body["command"]),
            settings={name: RecordedSetting(**_object(s, name)) for name, s in _object(body["settings"], "s").items()},
            contents={name: Content(**_object(c, name)) for name, c in _object(body["contents"], "c").items()},
            versions={name: str(text) for name, text in _object(body["versions"], "versions").items()},
            machine=_object(body["machine"], "machine"),
            changes=tuple(Change(**_object(change, "a change")) for change in _list(body["changes"])),
        )
    except (KeyError, TypeError) as error:
        raise RecordFault(f"it lacks a part: {error}") from error


def plain(value: object) -> object:
    """A value of a setting as it is recorded: JSON, a tuple as a list, and without anything that looks like a key."""
    if isinstance(value, tuple | list):
        return [plain(part) for part in cast("Sequence[object]", value)]
    return scrub_text(value) if isinstance(value, str) else value


def shown(value: object) -> str:
    """A recorded value as a person reads it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, list | tuple):
        return " ".join(shown(part) for part in cast("Sequence[object]", value))
    return (value or "empty") if isinstance(value, str) else f"{value}"


def with_checksum(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with a hash of everything else in it."""
    return {**record, "sha256": _sha256(record)}


def checked(value: object) -> dict[str, Any]:
    """The record that `with_checksum` was given.

    Raises:
        RecordFault: any part of it has changed.
    """
    record = dict(_object(value, "the file"))
    found, expected = record.pop("sha256", None), _sha256(record)
    if found != expected:
        raise RecordFault(f"its content has SHA-256 {expected}, and it says {found}")
    return record


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RecordFault(f"{name} is no JSON object")
    return cast("dict[str, Any]", value)


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise RecordFault("the changes are no list")
    return cast("list[object]", value)
