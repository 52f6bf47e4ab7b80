"""Settings of a run that goes on, compared with its record before anything else is read. Imports no torch.

A flag of the present command is a change that a person asked for: it is taken, recorded, and holds. Any other
difference was made underneath, in a file: it is refused by name unless `--accept_changes` names it.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, cast

from rft.hub.hub_names import with_recorded_commits
from rft.hub.run_settings import pinned
from rft.identity.contents import SETTING_OF
from rft.identity.record import plain, shown
from rft.identity.sorting import CONTENT, decides, fixed_setting, is_recorded
from rft.identity.storage import CONFIG, IDENTITY, StoredRecord, config_bytes, read_record
from rft.resolved import Origin, Resolved
from rft_core.errors import CheckpointError, OptionsError
from rft_core.nearest_names import nearest_names
from rft_dist.checkpoint_format.layout import CHECKPOINTS, published

_LOG = logging.getLogger(__name__)
FINISHED = "run.finished"
"""Code of the error of a resume that would train nothing."""
VERSIONS = "versions"
"""The name under which other versions of packages are accepted."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """A start of the program, with the record of the run that it continues, if any."""

    resolved: Resolved[Any]
    """The settings, with those that an earlier resume was given."""
    recorded: StoredRecord | None = None
    """None for a run that begins, or that a version without records began."""
    accepted: frozenset[str] = frozenset()
    """Names of differences that are taken knowingly."""
    run: Path = Path()
    """Directory of the run that goes on."""
    in_place: bool = False
    """Whether the run goes on by `rft-train resume`, and not by a whole command with --load_checkpoint."""

    def accepting(self, names: list[str]) -> str:
        """Return how these differences, beside those that are accepted already, are taken knowingly."""
        joined = ",".join(dict.fromkeys([*sorted(self.accepted), *names]))
        if any(origin.kind == "keyword argument" for origin in self.resolved.origins.values()):
            return f"the script, with accept_changes={joined!r}"
        if not self.in_place:
            return f"this command, with --accept_changes {joined}"
        return f"rft-train resume {shlex.quote(str(self.run))} --accept_changes {joined}"


def continuation(resolved: Resolved[Any], in_place: Path | None) -> Continuation:
    """Compare the settings with the record of the run that goes on; `in_place` is its directory in a resume.

    Raises:
        OptionsError: a setting that decides the result is another one, and nobody asked for it; a setting that no
            resume can change; a name to accept that does not exist.
        CheckpointError: the record is damaged.
    """
    accepted = _accepted(resolved)
    run = in_place or _own_directory(resolved)
    if run is None:
        if accepted:
            raise _nothing_continued(resolved, accepted)
        return Continuation(resolved)
    # a command that begins again has all its settings, and a resume those of the directory
    begins_again = not published(run / CHECKPOINTS)
    recorded = None if begins_again and in_place is None else read_record(run)
    if recorded is None:
        return Continuation(resolved, None, accepted, run, in_place is not None)
    if recorded.identity.command != resolved.command:
        raise _other_command(recorded, resolved, run)
    resolved = _with_overrides(_with_commits(resolved, recorded), recorded, accepted)
    changed = _changed(resolved, recorded)
    _refuse_fixed(resolved, recorded, changed, run)
    at = Continuation(resolved, recorded, accepted, run, in_place is not None)
    unasked = [name for name in changed if not given(resolved, name) and name not in accepted]
    unasked = [name for name in unasked if decides(name) or _is_lost(resolved, recorded, name)]
    if unasked:
        raise _unasked(at, recorded, unasked)
    _tell(resolved, recorded, changed, run)
    # files may have changed where nothing was trained
    return replace(at, recorded=None) if begins_again else at


def with_commits(at: Continuation) -> Continuation:
    """Return a start whose names of the Hub have commit hashes: those of the record, or the newest ones.

    Ranks call it before they meet. Where two of them find different commits, a comparison of their contents tells it.
    """
    return replace(at, resolved=pinned(at.resolved))


def given(resolved: Resolved[Any], name: str) -> bool:
    """Return whether a person gives the setting in the present command, in place of a file or a default."""
    return name in resolved.origins and resolved.origins[name].kind in ("command line", "keyword argument")


def new_run(resolved: Resolved[Any], run: Path) -> str:
    """The command of a new run that begins with the weights of this one, with the flags of the present command."""
    free = next(path for n in count(2) if not (path := run.with_name(f"{run.name}-{n}")).exists())
    at, there = shlex.quote(str(run)), shlex.quote(str(free))
    names = [name for name in resolved.values if is_recorded(name) and name != "ckpt_path" and given(resolved, name)]
    words = [_flag(name, resolved.values[name]) for name in names]
    begins = ["--no-load_checkpoint"] if resolved.values.get("load_checkpoint") else []
    parts = [f"--config {at}/{CONFIG}", *words, f"--save_path {there} --ckpt_path {at} --ckpt_weights_only", *begins]
    return " ".join(["rft-train", resolved.command, *parts])


def _flag(name: str, value: object) -> str:
    """Return the setting as a flag with its value."""
    parts = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
    return " ".join([f"--{name}", *(shlex.quote(shown(part) if part != "" else "") for part in parts)])


def _own_directory(resolved: Resolved[Any]) -> Path | None:
    """Return the run's directory where the present command continues it in place with --load_checkpoint."""
    checkpoint = resolved.settings.checkpoint
    if not checkpoint.load_checkpoint or not checkpoint.save_path:
        return None
    run = Path(checkpoint.save_path).expanduser()
    source = Path(checkpoint.ckpt_path or run).expanduser().resolve()
    return run if source == run.resolve() or run.resolve() in source.parents else None


def _accepted(resolved: Resolved[Any]) -> frozenset[str]:
    """Return the names of `accept_changes`."""
    text = str(resolved.values.get("accept_changes", ""))
    names = [name for name in map(str.strip, text.split(",")) if name]
    recorded = {name for name in resolved.values if is_recorded(name)}
    known = {*recorded, *SETTING_OF, VERSIONS} - {*SETTING_OF.values()}
    for name in names:
        if name not in known:
            near = nearest_names(name, sorted(known), count=1)
            raise OptionsError(
                code="identity.unknown_name",
                what=f"accept_changes names {name!r}, which is nothing that a run records",
                where=f"accept_changes: {resolved.origins['accept_changes']}",
                why="it is the name of a setting, or model, tokenizer, weights or versions: a refusal prints it",
                do=f"--accept_changes {near[0]}" if near else "leave --accept_changes out to see the names",
            )
    return frozenset(names)


def _changed(resolved: Resolved[Any], recorded: StoredRecord) -> list[str]:
    """Return the settings whose values are not those of the record."""
    before = recorded.identity.settings
    # what a later version of the program has added is recorded, and compared from then on
    names = [name for name in resolved.values if is_recorded(name) and name in before]
    return [name for name in names if before[name].value != plain(resolved.values[name])]


def _with_commits(resolved: Resolved[Any], recorded: StoredRecord) -> Resolved[Any]:
    """Return the settings with the commits of the record for what they name of the Hub without a revision."""
    before = {name: setting.value for name, setting in recorded.identity.settings.items()}
    return resolved.with_values(with_recorded_commits(resolved.values, before))


def _with_overrides(resolved: Resolved[Any], recorded: StoredRecord, accepted: frozenset[str]) -> Resolved[Any]:
    """Return the settings with values that an earlier resume was given, where a file still has the ones before."""
    overrides: dict[str, Any] = {}
    for name in _changed(resolved, recorded):
        now = plain(resolved.values[name])
        earlier = [change for change in recorded.identity.changes if change.name == name]
        is_free = name not in CONTENT and name not in accepted and not given(resolved, name)
        if is_free and any(change.before == now for change in earlier):
            value = recorded.identity.settings[name].value
            overrides[name] = tuple(cast("list[object]", value)) if isinstance(value, list) else value
            last = earlier[-1]
            _LOG.info(
                "%s = %s, as given at step %d (%s); %s has %s",
                *(name, shown(overrides[name]), last.step, last.origin, resolved.origins[name], shown(now)),
            )
    return resolved.with_values(overrides, Origin("file", str(recorded.source))) if overrides else resolved


def _tell(resolved: Resolved[Any], recorded: StoredRecord, changed: list[str], run: Path) -> None:
    if recorded.config is None:
        _LOG.info("%s is not there: compared with the copy in %s", run / IDENTITY, recorded.source)
    for name in changed:
        before, now = shown(recorded.identity.settings[name].value), shown(plain(resolved.values[name]))
        _LOG.info("%s = %s from here on (%s); it was %s", name, now, resolved.origins[name], before)
    text = config_bytes(run)
    if text is not None and not recorded.config_is(text) and not any(map(decides, changed)):
        _LOG.info("%s was edited; it has the recorded settings, and is written again", run / CONFIG)


def _line(resolved: Resolved[Any], name: str, before: object, origin: str) -> str:
    now = plain(resolved.values[name])
    return f"{name}: {shown(before)} in the record ({origin}), {shown(now)} now ({resolved.origins[name]})"


def _lines(resolved: Resolved[Any], recorded: StoredRecord, names: list[str]) -> str:
    settings = recorded.identity.settings
    lines = [_line(resolved, name, settings[name].value, settings[name].origin) for name in names]
    return "\n    " + "\n    ".join(lines)


def _refuse_fixed(resolved: Resolved[Any], recorded: StoredRecord, changed: list[str], run: Path) -> None:
    """Raise `OptionsError` for the first setting that no resume can change."""
    for name in changed:
        before, now = recorded.identity.settings[name].value, plain(resolved.values[name])
        fixed = fixed_setting(resolved.command, name)
        if fixed is None or not fixed.differs(before, now):
            continue
        remedy = f"leave --{name} out" if given(resolved, name) else f"--{name} {shown(before)}"
        if fixed.from_weights and given(resolved, name):
            remedy = new_run(resolved, run)
        raise OptionsError(
            code="identity.fixed",
            what=f"a resume cannot change {name} from {shown(before)} to {shown(now)}",
            where=_line(resolved, name, before, recorded.identity.settings[name].origin),
            why=fixed.why,
            state=f"nothing was started; {run} is untouched",
            do=remedy,
        )


def _is_lost(resolved: Resolved[Any], recorded: StoredRecord, name: str) -> bool:
    """Return whether a setting that named a file names none any more, or the other way round."""
    return name in CONTENT and bool(recorded.identity.settings[name].value) != bool(resolved.values[name])


def _unasked(at: Continuation, recorded: StoredRecord, names: list[str]) -> OptionsError:
    run = at.run
    noun = "1 setting that decides its result is" if len(names) == 1 else f"{len(names)} settings that decide it are"
    config, back = shlex.quote(str(run / CONFIG)), f"rft-train resume {shlex.quote(str(run))}"
    if at.in_place and recorded.config is not None:
        back = f"mv {config} {config}.edited && {back}"
    return OptionsError(
        code="identity.settings_changed",
        what=f"{run} would go on with another result: {noun} not what {recorded.source.name} records",
        where=_lines(at.resolved, recorded, names),
        why="nobody asked for it in this command: a file has changed or lost lines, or a flag was left out",
        state=f"nothing was started; {run} is untouched",
        do=f"to go on as recorded: {back}; to take the new values: {at.accepting(names)}",
    )


def _other_command(recorded: StoredRecord, resolved: Resolved[Any], run: Path) -> OptionsError:
    return OptionsError(
        code="identity.other_command",
        what=f"{run} is a run of rft-train {recorded.identity.command}, not of rft-train {resolved.command}",
        where=str(recorded.source),
        why="a run goes on by the command that began it",
        state=f"nothing was started; {run} is untouched",
        do=f"rft-train resume {shlex.quote(str(run))}",
    )


def _nothing_continued(resolved: Resolved[Any], accepted: frozenset[str]) -> OptionsError:
    return OptionsError(
        code="identity.nothing_continued",
        what=f"accept_changes = {', '.join(sorted(accepted))}, and this command begins a run",
        where=f"accept_changes: {resolved.origins['accept_changes']}",
        why=f"it names differences from the {IDENTITY} of a run that goes on",
        do="leave --accept_changes out",
    )


def twice_as_long(values: Mapping[str, Any]) -> list[str]:
    """Return the limits of a run as keyword arguments with twice their values; none where its loss ended it."""
    return [f"{name}={2 * values[name]}" for name in _limits(values)]


def _limits(values: Mapping[str, Any]) -> list[str]:
    # what ended by its loss has the same loss when it is continued
    if values.get("patience") or values.get("target_loss"):
        return []
    # of a run that is told in episodes, epochs are those of a step
    passes = "num_episodes" if "num_episodes" in values else "max_epochs"
    return [name for name in ("max_steps", "train_tokens", passes) if values.get(name)]


def nothing_left(path: Path, step: int, values: Mapping[str, Any]) -> CheckpointError:
    """The error of a resume that would train nothing; `values`: settings of the run, of which one ended it."""
    limits = _limits(values)
    if "max_steps" in limits:
        limits = ["max_steps"] if values["max_steps"] <= step else limits[1:]
    # which of tokens and epochs ended it depends on the text, which is not read for this
    longer = f"; it goes on with {' and '.join(f'--{name} above {values[name]}' for name in limits)}" if limits else ""
    return CheckpointError(
        code=FINISHED,
        what=f"nothing is left to do: the run is at step {step}, its last",
        where=str(path),
        why=f"a resume that trains nothing would look like one that worked{longer}",
        state=f"the run is complete at {path}",
        do=f"rft-train runs show {path}",
    )
