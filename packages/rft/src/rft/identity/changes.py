"""The record of a start: that of a new run, or that of the run which goes on, with every change since."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.identity.contents import SETTING_OF
from rft.identity.continuation import VERSIONS, Continuation, given, new_run
from rft.identity.record import Change, Content, Identity, RecordedSetting, plain
from rft.identity.sorting import is_recorded
from rft.identity.storage import config_bytes, config_with, manifest_entries, write_record
from rft.resolved import Resolved
from rft_core.errors import DataError

_LOG = logging.getLogger(__name__)
ROWS = "prompt_data"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The identity of a run and the text of its config.yaml, as its directory and its checkpoints are to hold them."""

    identity: Identity
    config: str
    other_rows: str = ""
    """Hash of the rows in use, where others were accepted in the place of those of the checkpoint."""

    def metadata(self) -> dict[str, Any]:
        """Return what the manifest of each checkpoint holds of it."""
        return manifest_entries(self.identity, self.config)

    def write(self, run: Path) -> None:
        """Write it into the directory of the run."""
        write_record(run, self.identity, self.config)


@dataclass(frozen=True, slots=True)
class Facts:
    """Contents, versions and machine that a start finds beside its settings."""

    contents: Mapping[str, Content]
    versions: Mapping[str, str]
    machine: Mapping[str, object]


def new_record(resolved: Resolved[Any], facts: Facts) -> RunRecord:
    """Make the record of a run that begins."""
    return RunRecord(_identity(resolved, facts), resolved.config_yaml)


def continued_record(at: Continuation, facts: Facts, run: Path, step: int) -> RunRecord:
    """Make the record of a run that goes on after `step`, with what has changed and was asked for."""
    resolved, recorded = at.resolved, at.recorded
    if recorded is None:
        _LOG.info("%s was begun by a version that kept no record of what decides its result: kept from here on", run)
        text = (config_bytes(run) or b"").decode("utf-8", errors="replace") or resolved.config_yaml
        names = [name for name in resolved.values if is_recorded(name) and given(resolved, name)]
        rows = facts.contents.get(ROWS)
        accepted_rows = rows.digest if rows and ROWS in at.accepted else ""
        return RunRecord(_identity(resolved, facts), config_with(text, resolved, names, step), accepted_rows)
    before = recorded.identity
    settings = _setting_changes(resolved, before, step)
    contents = _content_changes(at, facts, step)
    machine = [
        Change(step, name, before.machine.get(name), value, "the start of this process")
        for name, value in facts.machine.items()
        if before.machine.get(name) != value
    ]
    for name in sorted(at.accepted - {change.name for change in (*settings, *contents)}):
        _LOG.info("accept_changes: %s is as recorded", name)
    now = _identity(resolved, facts)
    origins = {change.name: f"{change.origin}, at step {step}" for change in settings}
    kept = {name: setting for name, setting in before.settings.items() if name not in origins}
    changed = {name: RecordedSetting(now.settings[name].value, origin) for name, origin in origins.items()}
    identity = Identity(
        command=before.command,
        settings={name: {**now.settings, **kept, **changed}[name] for name in now.settings},
        # a directory that is no longer there, and that nothing reads any more, stays on record
        contents={name: _kept(before.contents.get(name), content) for name, content in facts.contents.items()},
        versions=now.versions,
        machine=now.machine,
        changes=(*before.changes, *settings, *contents, *machine),
    )
    text = recorded.config
    if text is None:
        text = (config_bytes(run) or b"").decode("utf-8", errors="replace") or resolved.config_yaml
    rows = facts.contents.get(ROWS)
    other_rows = rows.digest if rows and any(change.name == ROWS for change in contents) else ""
    return RunRecord(identity, config_with(text, resolved, origins, step), other_rows)


def _identity(resolved: Resolved[Any], facts: Facts) -> Identity:
    return Identity(
        command=resolved.command,
        settings={
            name: RecordedSetting(plain(value), str(resolved.origins.get(name, "")))
            for name, value in resolved.values.items()
            if is_recorded(name)
        },
        contents=dict(facts.contents),
        versions=dict(facts.versions),
        machine=dict(facts.machine),
    )


def _setting_changes(resolved: Resolved[Any], before: Identity, step: int) -> list[Change]:
    changes: list[Change] = []
    for name, value in resolved.values.items():
        recorded = before.settings.get(name)
        if is_recorded(name) and recorded is not None and recorded.value != plain(value):
            changes.append(Change(step, name, recorded.value, plain(value), str(resolved.origins[name])))
    return changes


def _content_changes(at: Continuation, facts: Facts, step: int) -> list[Change]:
    """Return the changes of contents and packages, which were asked for or accepted."""
    assert at.recorded is not None
    before = at.recorded.identity
    changes: list[Change] = []
    for name in _differing(before, facts):
        old, new = before.contents.get(name), facts.contents.get(name)
        changes.append(Change(step, name, old and old.digest, new and new.digest, _asked(at, name)))
    if _versions_differ(before, facts):
        changes.append(Change(step, VERSIONS, dict(before.versions), dict(facts.versions), _asked(at, VERSIONS)))
    for change in changes:
        _LOG.info("%s is another one from step %d on (%s)", change.name, step, change.origin)
    return changes


def _asked(at: Continuation, name: str) -> str:
    setting = SETTING_OF.get(name, name)
    if name in at.accepted:
        return f"accept_changes: {at.resolved.origins['accept_changes']}"
    return f"{setting}: {at.resolved.origins.get(setting, 'this start')}"


def _kept(before: Content | None, now: Content) -> Content:
    return before if before is not None and now.digest == "absent" else now


def _differing(before: Identity, facts: Facts) -> list[str]:
    """Return the names of contents that are not those of the record."""
    now = facts.contents
    both = [name for name in now if name in before.contents and now[name].digest != before.contents[name].digest]
    # what cannot be read any more is told by the part that needs it
    return [name for name in both if now[name].digest != "absent"] + sorted(set(before.contents) ^ set(now))


def _versions_differ(before: Identity, facts: Facts) -> bool:
    return _packages(before.versions) != _packages(facts.versions)


def _packages(versions: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in versions.items() if name != "python"}


def refuse_changed(at: Continuation, facts: Facts) -> None:
    """Compare files, code and packages with the record of the run that goes on.

    Raises:
        DataError: what some of them hold has changed, and nobody asked for it.
    """
    if at.recorded is None:
        return
    before, resolved, run = at.recorded.identity, at.resolved, at.run
    unasked: list[str] = []
    hashed_otherwise: list[str] = []
    lines: list[str] = []
    for name in _differing(before, facts):
        old, new = before.contents.get(name), facts.contents.get(name)
        if name == ROWS and old and new and old.count != new.count:
            raise _other_number(resolved, run, old, new)
        setting = SETTING_OF.get(name, name)
        recorded = before.settings.get(setting)
        # a flag that says what the record says is no word about a file that has changed underneath
        asked = given(resolved, setting) and (recorded is None or recorded.value != plain(resolved.values[setting]))
        if not asked and name not in at.accepted:
            unasked.append(name)
            if old and new and old.scheme != new.scheme:
                hashed_otherwise.append(name)
            lines.append(f"{name}: {_described(old)} in the record, {_described(new)} now")
    if _versions_differ(before, facts) and VERSIONS not in at.accepted:
        unasked.append(VERSIONS)
        old_ones, new_ones = _packages(before.versions), _packages(facts.versions)
        names = [name for name in sorted({*old_ones, *new_ones}) if old_ones.get(name) != new_ones.get(name)]
        lines.append(
            ", ".join(f"{name} {old_ones.get(name)} in the record, {new_ones.get(name)} now" for name in names)
        )
    if not unasked:
        return
    if hashed_otherwise == unasked:
        raise _hashed_otherwise(at, unasked, lines)
    raise DataError(
        code="identity.files_changed",
        what=f"{run} would go on with another result: {', '.join(unasked)} "
        f"{'is' if len(unasked) == 1 else 'are'} not what {at.recorded.source.name} records",
        where="\n    " + "\n    ".join(lines),
        why="nobody asked for it in this command: files or packages have changed since the run began"
        + (f" ({', '.join(hashed_otherwise)} only perhaps: by another hash scheme)" if hashed_otherwise else ""),
        state=f"nothing was started; {run} is untouched",
        do=f"put the old ones back, or take the new ones: {at.accepting(unasked)}",
    )


def _hashed_otherwise(at: Continuation, names: list[str], lines: list[str]) -> DataError:
    return DataError(
        code="identity.hash_scheme",
        what=f"{at.run} records {', '.join(names)} by another hash scheme than this program has",
        where="\n    " + "\n    ".join(lines),
        why="another version of the program hashed the rows: the hashes cannot tell whether the rows are the same",
        state=f"nothing was started; {at.run} is untouched",
        do=f"where the rows are those that the run began with, go on with {at.accepting(names)}",
    )


def _described(content: Content | None) -> str:
    if content is None:
        return "nothing"
    covers = f"{content.covers}{f'; {content.place}' if content.place else ''}"
    # a number of rows stands for rows: records of earlier versions have it without a scheme
    scheme = f"; hash scheme {content.scheme or 'without a number'}" if content.count else ""
    return f"{content.digest[:12]} ({covers}{scheme})"


def _other_number(resolved: Resolved[Any], run: Path, old: Content, new: Content) -> DataError:
    return DataError(
        code="identity.other_rows",
        what=f"{run} trains on {old.count:,} rows, and there are {new.count:,} now",
        where=f"prompt_data: {new.place}",
        why="an epoch that is partly trained goes on with as many rows as it began with",
        state=f"nothing was started; {run} is untouched",
        do=f"put the old rows back, or begin a new run with its weights: {new_run(resolved, run)}",
    )
