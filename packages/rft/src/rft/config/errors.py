"""Problems of settings, reported all at once."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from rft.config import option_problems
from rft.config.commands import typed
from rft.config.names import CONFIG
from rft.config.origins import GivenSetting
from rft.config.other_names import named_elsewhere
from rft.config.refused_flags import REFUSED_FLAGS, Refusal
from rft.config.schema import REQUIRED, Setting, commands_with, schema
from rft.config.values import NotAllowed, allowed, as_python, as_text, convert, example
from rft.resolved import Origin
from rft_core.errors import OptionsError, Problem
from rft_core.nearest_names import nearest_names, similarity
from rft_core.secrets import HIDDEN, looks_like_key

_MEANT = {"gpu": "cuda"}
"""Values that say what another word is the name of."""
_SLIP = 0.85
"""Similarity from which on another name is taken for the one that was meant."""
_PLACEHOLDER = re.compile(r"--(\w+) (?:N|NAME|PATH|DIR|TEXT|PROJECT|FILE)")


class SettingsError(OptionsError):
    """Settings that cannot be used; `problems` holds each, `problem` the one or a summary."""

    def __init__(self, *, problems: Sequence[Problem] = (), **fields: str) -> None:
        super().__init__(**(fields or asdict(_summary(problems))))
        self.problems = tuple(problems) or self.problems

    def with_bundle(self, path: str) -> SettingsError:
        """The same problems, naming the diagnostics file that was written for them."""
        return SettingsError(problems=self.problems, **asdict(replace(self.problem, bundle=path)))

    def as_json(self) -> str:
        """Return one JSON line: the problem, all the problems where there are several, and the exit code."""
        if len(self.problems) < 2:
            return super().as_json()
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


def unknown_option(command: str, option: GivenSetting, names: Mapping[str, Setting] | None = None) -> Problem:
    """Return the problem of a name that no command has, or only another command.

    `names` are those that the command takes, where they are more than its settings.
    """
    table = names or schema(command)
    elsewhere = commands_with(option.name)
    meant = next((name for name in named_elsewhere(option.name) if name in table), "")
    options = [meant] if meant else _nearest(option.name, table)
    listed = ", ".join(_like(option, name) for name in options)
    if elsewhere:
        *first, last = (f"rft-train {typed(name)}" for name in elsewhere)
        why = f"it is a setting of {', '.join(first)}{' and ' if first else ''}{last}"
        why += f"; nearest here: {listed}" if options else ""
    elif meant:
        why = f"it is called {listed} here"
    else:
        near = listed or ", ".join(_refused_neighbours(option))
        why = f"nearest: {near}" if near else f"no setting of rft-train {typed(command)} has a name like it"
    do = following(option, table, meant or mistyped(option.name, table))
    return option_problems.unknown_option(
        option.written, why, do or f"rft-train {typed(command)} --help", str(option.origin)
    )


def _nearest(name: str, table: Mapping[str, Setting]) -> list[str]:
    """Settings with a name like it; where it begins with that of a group, also like the rest of it."""
    group, _, rest = name.replace(".", "_").partition("_")
    alike = nearest_names(name.replace(".", "_"), table)
    if group not in {setting.group for setting in table.values()}:
        return alike or nearest_names(name.rpartition(".")[2], table)
    # a right group first, then the right name in another
    inside = {key: row for key, row in table.items() if row.group == group}
    parts = [nearest_names(rest, inside, count=1, cutoff=_SLIP), nearest_names(rest, table, count=2), alike]
    return list(dict.fromkeys(near for part in parts for near in part))[:3]


def mistyped(name: str, table: Mapping[str, Setting]) -> str:
    """The one setting that a slip of the fingers may have made of; else "", since a guess would be followed."""
    written = name.rpartition(".")[2]
    near = nearest_names(written, table, count=2, cutoff=_SLIP)
    # a word more is meant to say something else: --eval_top_p is not --top_p
    if not near or set(_words(near[0])) < set(_words(written)):
        return ""
    is_unique = len(near) == 1 or similarity(written, near[0]) > similarity(written, near[1])
    return near[0] if is_unique else ""


def _words(name: str) -> list[str]:
    return re.split(r"[_-]+", name.lower())


def following(option: GivenSetting, table: Mapping[str, Setting], name: str) -> str:
    """The assignment of the given value to another setting; "" where there is none or it does not take the value."""
    if not name:
        return ""
    setting = table.get(name)  # none of --config, which takes any text
    if setting is not None and option.texts and not looks_like_key(" ".join(option.texts)):
        try:
            convert(setting, option.texts)
        except NotAllowed:
            return ""
    is_bare_flag = setting is not None and (setting.is_switch or "bare" in setting.metadata)
    text = " ".join(option.texts)
    value = "VALUE" if looks_like_key(text) or not (text or is_bare_flag) else text
    return assignment_of(option, name, value)


def _refused_neighbours(option: GivenSetting) -> list[str]:
    return [
        f"{_like(option, name)} (known, but not usable here)"
        for name in nearest_names(option.name, REFUSED_FLAGS, count=1)
    ]


def refused_option(option: GivenSetting, refusal: Refusal, command: str = "") -> Problem:
    """Return the problem of a name or value of the guides that this version does not have.

    Where the refusal names another setting of the command with a placeholder, the given value takes its place.
    """
    table = schema(command) if command else {}
    match = _PLACEHOLDER.fullmatch(refusal.do)
    do = following(option, table, match[1]) if match and match[1] in (*table, CONFIG) and option.texts else ""
    return refused_setting(option, _like(option, option.name), refusal.reason, do or refusal.do)


def refused_setting(option: GivenSetting, shown: str, reason: str, do: str) -> Problem:
    """Return the problem of a name or value that is known and not usable, as `shown`, with the reason."""
    return Problem(
        code="option.refused",
        what=f"{shown} cannot be used: {reason}",
        where=str(option.origin),
        why="a setting has an effect or is refused; none is ignored",
        do=do,
    )


def bad_value(setting: Setting, option: GivenSetting) -> Problem:
    """Return the problem of a value of the wrong kind or out of bounds."""
    text = option.texts[0] if option.texts else ""
    near = [_MEANT[text]] if _MEANT.get(text) in setting.choices else nearest_names(text, setting.choices)
    # where nothing is like it, a value that is allowed and changes nothing
    unchanged = str(setting.default) if setting.default in setting.choices else "".join(setting.choices[:1])
    legal = near[0] if near else unchanged or ("true" if setting.is_switch else example(setting, option.texts))
    what = f"{shown_option(option)} is not allowed: it takes {allowed(setting)}"
    why = f"nearest: {', '.join(near)}" if near else f"the default is {_default(setting)}"
    do = assignment_of(option, setting.name, legal)
    if option.is_null and option.origin.kind == "keyword argument":
        do = f"leave {option.written} out"
    return option_problems.not_a_value(what, why, do, str(option.origin))


def key_as_project(option: GivenSetting) -> Problem:
    """Return the problem of a tracker's project that looks like its key."""
    do = assignment_of(option, option.name, "PROJECT")
    return Problem(
        code="option.secret",
        what=f"{option.written} takes the name of a project; what was given looks like a key and is not shown",
        where=str(option.origin),
        why="a key on a command line or in a file ends up in histories, logs and checkpoints",
        do=f"put the key into the environment (WANDB_API_KEY) and write {do}",
    )


def given_twice(first: GivenSetting, second: GivenSetting) -> Problem:
    """Return the problem of two values for one setting, under two of its names."""
    return Problem(
        code="option.given_twice",
        what=f"{shown_option(first)} and {shown_option(second)} are one setting with two values",
        where=str(second.origin),
        why="the name of the group may stand before that of the setting, which is the same without it",
        do=f"leave {second.written} out",
    )


def missing_setting(command: str, setting: Setting) -> Problem:
    """Return the problem of a setting without a default that no source gives."""
    return Problem(
        code="option.missing",
        what=f"--{setting.name} is missing: it takes {allowed(setting)}",
        where="neither the command line nor a file gives it",
        why="it has no default",
        do=f"rft-train {typed(command)} --{setting.name} PATH",
    )


def unreadable(code: str, what: str, origin: Origin, why: str, do: str) -> Problem:
    """Return the problem of a file that is not a flat list of settings."""
    return Problem(code=code, what=what, where=str(origin), why=why, do=do)


def shown_option(option: GivenSetting) -> str:
    text = " ".join(option.texts)
    value = HIDDEN if looks_like_key(text) else text if len(text) <= 80 else f"{text[:77]}..."
    return f"{option.written} = {value or 'nothing'}"


def _like(option: GivenSetting, name: str) -> str:
    """Return a name in the form in which the setting was written: as a flag or bare."""
    return f"--{name}" if option.origin.kind == "command line" else name


def assignment_of(option: GivenSetting, name: str, value: str) -> str:
    if option.origin.kind == "command line":
        return f"--{name} {value}" if value else f"--{name}"
    if option.origin.kind == "environment":
        return f"export {option.origin.file}={value}"
    return f"{name}={as_python(value)}" if option.origin.kind == "keyword argument" else f"{name}: {value}"


def _default(setting: Setting) -> str:
    return "required" if setting.default is REQUIRED else as_text(setting.default) or "empty"
