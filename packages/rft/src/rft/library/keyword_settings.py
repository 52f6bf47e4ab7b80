"""Keyword arguments of Python code as settings: the names of the flags, the same checks, the same errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rft.config.commands import installed_spellings
from rft.config.merged_sources import MergedSources, SettingsFile, defaults, validated
from rft.config.names import CONFIG, negate, setting_of
from rft.config.origins import KEYWORD, GivenSetting
from rft.config.other_names import named_elsewhere
from rft.config.schema import Setting, schema
from rft.resolved import Resolved
from rft_core.errors import OptionsError

_REWARD = "reward"
_RUN_SETTINGS = "config.yaml"


def resolved(
    command: str,
    keywords: Mapping[str, object],
    config: str | Path | Sequence[str | Path] = (),
    own: Sequence[GivenSetting] = (),
) -> Resolved[Any]:
    """Return the settings of a command from files and keyword arguments; the later wins.

    Args:
        command: the name of the command whose settings they are.
        keywords: settings under the names of their flags.
        config: files of settings, or directories of runs.
        own: settings that follow from other arguments, such as the file of the rows.

    Raises:
        SettingsError: with every problem, as on the command line.
        OptionsError: there is no such file.
    """
    return validated(merged(command, keywords, config, own))


def merged(
    command: str,
    keywords: Mapping[str, object],
    config: str | Path | Sequence[str | Path] = (),
    own: Sequence[GivenSetting] = (),
) -> MergedSources:
    """Return the settings as `resolved` does, with their problems in the place of an error."""
    sources = defaults(command)
    sources.spellings = installed_spellings(command)
    for reference in [config] if isinstance(config, str | Path) else config:
        sources.add_file(_file(Path(reference).expanduser()))
    for option in (*givens(command, keywords), *own):
        sources.add(option)
    return sources


def givens(command: str, keywords: Mapping[str, object]) -> list[GivenSetting]:
    """Each keyword as a setting that was given; `config` is none, it names files of settings."""
    table = schema(command)
    result: list[GivenSetting] = []
    for written, value in keywords.items():
        if written == CONFIG:
            continue
        name, negated = setting_of(written, table)
        if name not in table and _REWARD in named_elsewhere(name):
            _check_text(written, value)
        texts = as_texts(value, table.get(name))
        result.append(GivenSetting(written, name, negate(texts) if negated else texts, KEYWORD, is_null=value is None))
    return result


def _check_text(written: str, value: object) -> None:
    """Refuse functions under another trainer's name of the reward: as text they would be their addresses."""
    parts = list(cast("Sequence[object]", value)) if isinstance(value, list | tuple) else [value]
    if not any(map(callable, parts)):
        return
    names = ", ".join(getattr(part, "__name__", "FUNCTION") if callable(part) else repr(part) for part in parts)
    raise OptionsError(
        code="library.reward_name",
        what=f"unknown option {written}",
        where="keyword argument",
        why="it is called reward here",
        do=f"{_REWARD}=[{names}]" if isinstance(value, list | tuple) else f"{_REWARD}={names}",
    )


def as_texts(value: object, setting: Setting | None = None) -> tuple[str, ...]:
    """A value as it would be written on the command line; True is a flag alone."""
    if value is None:
        return ("none",)
    if isinstance(value, bool):
        if setting is not None and "bare" in setting.metadata:
            return (str(setting.metadata["bare"]) if value else "",)
        return (str(value).lower(),)
    if isinstance(value, Mapping):
        # NAME=NUMBER of a flag
        pairs = cast("Mapping[object, object]", value).items()
        return (",".join(f"{name}={number}" for name, number in pairs),)
    if isinstance(value, list | tuple):
        return tuple(str(part) for part in cast("Sequence[object]", value))
    return (str(value),)


def command_words(
    command: str, options: Sequence[GivenSetting], config: str | Path | Sequence[str | Path] = ()
) -> list[str]:
    """Return the words of `rft-train` that mean the same as the settings that were given."""
    files = [config] if isinstance(config, str | Path) else config
    words = [word for file in files for word in (f"--{CONFIG}", str(file))]
    return ["rft-train", command, *words, *(word for row in options for word in (f"--{row.name}", *row.texts))]


def _file(path: Path) -> SettingsFile:
    if path.is_file():
        return SettingsFile(path, path.stem)
    if (path / _RUN_SETTINGS).is_file():
        return SettingsFile(path / _RUN_SETTINGS, path.resolve().name)
    raise OptionsError(
        code="library.no_config",
        what=f"config = {str(path)!r} is no file of settings and no run",
        where="keyword argument config",
        why="it is the path of a YAML file with the names of the flags as keys, or a run directory",
        state="nothing was started",
        do="leave config out and give the settings by name",
    )
