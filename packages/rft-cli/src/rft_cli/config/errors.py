"""Problems of settings, reported all at once."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace

from rft.resolved import Origin
from rft_cli.config.origins import GivenSetting
from rft_cli.config.refused_flags import REFUSED_FLAGS, Refusal
from rft_cli.config.schema import Required, Setting, commands_with, schema
from rft_cli.config.values import allowed, as_text, example
from rft_core.errors import OptionsError, Problem
from rft_core.nearest_names import nearest_names
from rft_core.secrets import HIDDEN, looks_like_key

NOTHING_STARTED = "nothing was started and nothing was changed"


class SettingsError(OptionsError):
    """Settings that cannot be used; `problems` holds each, `problem` the one or a summary."""

    def __init__(self, *, problems: Sequence[Problem] = (), **fields: str) -> None:
        self.problems = tuple(problems)
        super().__init__(**(fields or asdict(_summary(self.problems))))

    def with_bundle(self, path: str) -> SettingsError:
        """The same problems, naming the diagnostics file that was written for them."""
        return SettingsError(problems=self.problems, **asdict(replace(self.problem, bundle=path)))

    def as_json(self) -> str:
        """One JSON line: the problem, all the problems, and the exit code."""
        record = {"problem": asdict(self.problem), "problems": [asdict(item) for item in self.problems]}
        return json.dumps(record | {"exit_code": int(self.exit_code)}, ensure_ascii=False)


def _summary(problems: Sequence[Problem]) -> Problem:
    if len(problems) == 1:
        return problems[0]
    return Problem(
        code="option.several",
        what=f"{len(problems)} settings cannot be used",
        where="; ".join(dict.fromkeys(problem.where for problem in problems)),
        why="\n".join(f"{problem.what} ({problem.where})" for problem in problems),
        do=problems[0].do,
    )


def unknown_option(command: str, given: GivenSetting) -> Problem:
    """Return the problem of a name that no command has, or only another command."""
    elsewhere = commands_with(given.name)
    options = nearest_names(given.name, schema(command))
    if elsewhere:
        why = f"it is a setting of {' and '.join(f'rft-train {name}' for name in elsewhere)}"
        why += f"; nearest here: {', '.join(_like(given, name) for name in options)}" if options else ""
    else:
        near = [_like(given, name) for name in options] or _refused_neighbours(given)
        why = f"nearest: {', '.join(near)}" if near else f"no setting of rft-train {command} has a name like it"
    do = _assignment(given, options[0], _value(schema(command)[options[0]], given)) if options else ""
    return Problem(
        code="option.unknown",
        what=f"unknown option {given.written}",
        where=str(given.origin),
        why=why,
        do=do or f"rft-train {command} --help",
    )


def _refused_neighbours(given: GivenSetting) -> list[str]:
    return [
        f"{_like(given, name)} (known, but not usable here)"
        for name in nearest_names(given.name, REFUSED_FLAGS, count=1)
    ]


def refused_option(given: GivenSetting, refusal: Refusal) -> Problem:
    """Return the problem of a name or value of the guides that this version does not have."""
    return Problem(
        code="option.refused",
        what=f"{_like(given, given.name)} cannot be used: {refusal.reason}",
        where=str(given.origin),
        why="a setting has an effect or is refused; none is ignored",
        do=refusal.do,
    )


def bad_value(setting: Setting, given: GivenSetting) -> Problem:
    """Return the problem of a value of the wrong kind or out of bounds."""
    text = given.texts[0] if given.texts else ""
    near = nearest_names(text, setting.choices) or list(setting.choices[:1])
    legal = near[0] if near else "true" if setting.is_switch else example(setting, given.texts)
    return Problem(
        code="option.value",
        what=f"{_shown(given)} is not allowed: it takes {allowed(setting)}",
        where=str(given.origin),
        why=f"nearest: {', '.join(near)}" if setting.choices else f"the default is {_default(setting)}",
        do=_assignment(given, setting.name, legal),
    )


def key_as_project(given: GivenSetting) -> Problem:
    """Return the problem of a tracker's project that looks like its key."""
    return Problem(
        code="option.secret",
        what=f"{given.written} takes the name of a project; what was given looks like a key and is not shown",
        where=str(given.origin),
        why="a key on a command line or in a file ends up in histories, logs and checkpoints",
        do=f"put the key into the environment (WANDB_API_KEY) and write {_assignment(given, given.name, 'PROJECT')}",
    )


def missing_value(setting: Setting, given: GivenSetting) -> Problem:
    """Return the problem of a flag that needs a value and has none."""
    return Problem(
        code="option.no_value",
        what=f"{given.written} needs a value: {allowed(setting)}",
        where=str(given.origin),
        why="only switches stand alone",
        do=_assignment(given, setting.name, example(setting, ())),
    )


def config_without_name(given: GivenSetting) -> Problem:
    """Return the problem of `--config` that stands alone."""
    return Problem(
        code="option.no_value",
        what="--config needs a file or the name of a recipe",
        where=str(given.origin),
        why="only switches stand alone",
        do="rft-train recipes",
    )


def missing_setting(command: str, setting: Setting) -> Problem:
    """Return the problem of a setting without a default that no source gives."""
    return Problem(
        code="option.missing",
        what=f"--{setting.name} is missing: it takes {allowed(setting)}",
        where="neither the command line nor a file gives it",
        why="it has no default",
        do=f"rft-train {command} --{setting.name} PATH",
    )


def unexpected_argument(text: str, recipes: Sequence[str]) -> Problem:
    """Return the problem of a word that belongs to no flag."""
    shown = HIDDEN if looks_like_key(text) else text
    near = nearest_names(text, recipes, count=1)
    return Problem(
        code="option.stray",
        what=f"unexpected argument {shown!r}",
        where="command line",
        why="every value follows its flag: --flag VALUE",
        do=f"--config {near[0]}" if near else "remove it, or put its flag in front",
    )


def negated_with_value(given: GivenSetting) -> Problem:
    """Return the problem of a negated flag with a value, such as `--no-x true`."""
    return Problem(
        code="option.value",
        what=f"{given.written} stands alone, but {' '.join(given.texts)!r} follows",
        where=str(given.origin),
        why="it already means false",
        do=f"--{given.name} false",
    )


def unreadable(code: str, what: str, origin: Origin, why: str, do: str) -> Problem:
    """Return the problem of a file that is not a flat list of settings."""
    return Problem(code=code, what=what, where=str(origin), why=why, do=do)


def _shown(given: GivenSetting) -> str:
    text = " ".join(given.texts)
    value = HIDDEN if looks_like_key(text) else text if len(text) <= 80 else f"{text[:77]}..."
    return f"{given.written} = {value or 'nothing'}"


def _like(given: GivenSetting, name: str) -> str:
    """Return a name in the form in which the setting was written: as a flag or bare."""
    return f"--{name}" if given.origin.kind == "command line" else name


def _assignment(given: GivenSetting, name: str, value: str) -> str:
    if given.origin.kind == "command line":
        return f"--{name} {value}" if value else f"--{name}"
    return f"{name}={_literal(value)}" if given.origin.kind == "keyword argument" else f"{name}: {value}"


def _literal(text: str) -> str:
    """The text of a value as Python writes it."""
    if text.lower() in ("true", "false", "none"):
        return text.capitalize()
    return text if re.fullmatch(r"[+-]?\d[\d.]*(?:e[+-]?\d+)?", text) else repr(text)


def _value(setting: Setting, given: GivenSetting) -> str:
    if setting.is_switch and not given.texts:
        return ""
    text = " ".join(given.texts)
    return "VALUE" if not text or looks_like_key(text) else text


def _default(setting: Setting) -> str:
    return "required" if isinstance(setting.default, Required) else as_text(setting.default) or "empty"
