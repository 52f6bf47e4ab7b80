"""Problems of the words of a command line, which files and keyword arguments cannot have."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rft.config import option_problems
from rft.config.commands import typed
from rft.config.errors import assignment_of, following, mistyped
from rft.config.origins import GivenSetting
from rft.config.other_names import assignment, named_elsewhere
from rft.config.schema import Setting, schema
from rft.config.values import allowed, example
from rft.resolved import Origin
from rft_core.errors import Problem
from rft_core.nearest_names import nearest_names
from rft_core.secrets import HIDDEN, looks_like_key

_DATA = ("prompt_data", "eval_data", "texts")
_DASHES = "\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}\N{HORIZONTAL BAR}"


def missing_value(setting: Setting, option: GivenSetting) -> Problem:
    """Return the problem of a flag that needs a value and has none."""
    what = f"{option.written} needs a value: {allowed(setting)}"
    do = assignment_of(option, setting.name, example(setting, ()))
    return option_problems.needs_value(what, "only switches stand alone", do, str(option.origin))


def config_without_name(option: GivenSetting) -> Problem:
    """Return the problem of `--config` that stands alone."""
    what = "--config needs a file or the name of a recipe"
    return option_problems.needs_value(what, "only switches stand alone", "rft-train recipes", str(option.origin))


def unexpected_argument(text: str, recipes: Sequence[str], command: str = "") -> Problem:
    """Return the problem of a word that belongs to no flag."""
    shown = HIDDEN if looks_like_key(text) else text
    if text[:1] in tuple(_DASHES) and shown == text:
        flag = f"--{text.lstrip('-' + _DASHES)}"
        why = "flags begin with two hyphens; text programs turn them into one dash when a command is copied"
        return option_problems.stray_word(f"unexpected argument {text}, which begins with a dash", why, flag)
    assigned = assignment(text)
    if assigned and command and shown == text:
        return _assigned(*assigned, command)
    near = nearest_names(text, recipes, count=1)
    do = _flag_before(text, command) if command and shown == text else ""
    do = do or (f"--config {near[0]}" if near else "remove it, or put its flag in front")
    why = "every value follows its flag: --flag VALUE"
    return option_problems.stray_word(f"unexpected argument {shown!r}", why, do)


def _flag_before(text: str, command: str) -> str:
    """Return the word after the flag that it belongs to: of the data for a file, of the prompt for other text."""
    table, word = schema(command), shlex.quote(text)
    if Path(text).is_file():
        data = [name for name in _DATA if name in table]
        return f"--{data[0]} {word}" if data else ""
    return f"--prompt {word}" if "prompt" in table and not Path(text).exists() else ""


def _assigned(name: str, value: str, command: str) -> Problem:
    """The problem of `name=value`, the form of other programs."""
    table = schema(command)
    option = GivenSetting(f"{name}={value}", name, (value,), Origin("command line"))
    meant = next((other for other in named_elsewhere(name) if other in table), "")
    do = following(option, table, meant or mistyped(name, table))
    why = "every value follows its flag: --flag VALUE" + (f"; {name} is --{meant} here" if meant else "")
    return option_problems.stray_word(
        f"unexpected argument {name}={value}", why, do or f"rft-train {typed(command)} --help"
    )


def negated_with_value(option: GivenSetting) -> Problem:
    """Return the problem of a negated flag with a value, such as `--no-x true`."""
    what = f"{option.written} stands alone, but {' '.join(option.texts)!r} follows"
    return option_problems.not_a_value(what, "it already means false", f"--{option.name} false", str(option.origin))
