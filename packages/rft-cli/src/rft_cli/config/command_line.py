"""Parser of a command line into given settings: every form of a flag, no word lost."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rft.config.names import CONFIG, negate, setting_of
from rft.config.origins import GivenSetting
from rft.config.schema import Setting
from rft.resolved import Origin


@dataclass(slots=True)
class Words:
    """Parsed command line, in the order in which it was written."""

    options: list[GivenSetting] = field(default_factory=list[GivenSetting])
    configs: list[str] = field(default_factory=list[str])
    strays: list[str] = field(default_factory=list[str])
    without_value: list[GivenSetting] = field(default_factory=list[GivenSetting])
    negated_with_value: list[GivenSetting] = field(default_factory=list[GivenSetting])


def read(argv: Sequence[str], schema: dict[str, Setting]) -> Words:
    """Group words into flags and their values.

    Forms: `--name VALUE`, `--name=VALUE`, `--name` (a switch, or a flag with a bare value), `--no-name`, `--no_name`,
    and each with the name of the group in front; `-` and `_` alike. A flag that this command does not know takes all
    words up to the next flag, so that its values are not reported a second time.
    """
    words, rest = Words(), list(argv)
    while rest:
        word = rest.pop(0)
        if not is_flag(word):
            words.strays.append(word)
            continue
        written, equals, inline = word.partition("=")
        name, negated = setting_of(written.lstrip("-").replace("-", "_"), schema)
        setting = schema.get(name)
        # an unknown flag takes all its words, so that its values are not reported a second time
        values = [inline] if equals else _take(rest, _most(setting, name))
        _record(words, GivenSetting(written, name, tuple(values), Origin("command line", text=word)), setting, negated)
    return words


def is_flag(word: str) -> bool:
    """Return True when a word is a flag: negative numbers and a lone dash are values."""
    return word.startswith("-") and len(word) > 1 and not re.match(r"-\.?\d", word)


def two_forms(
    options: Sequence[GivenSetting], schema: dict[str, Setting]
) -> Iterator[tuple[GivenSetting, GivenSetting]]:
    """Pairs of options that give one setting two values, one with the name of its group and one without."""
    first: dict[str, GivenSetting] = {}
    for option in options:
        known = first.setdefault(option.name, option)
        written = {_bare(known.written), _bare(option.written)}
        full = schema[option.name].full_names if option.name in schema else ()
        if len(written) == 2 and written & {*full} and known.texts != option.texts:
            yield known, option


def _bare(written: str) -> str:
    return written.lstrip("-").replace("-", "_").removeprefix("no_")


def _most(setting: Setting | None, name: str) -> int:
    if setting is None:
        return 1 if name == CONFIG else 1_000_000
    return 2 if setting.is_pair else 1


def _take(rest: list[str], max_words: int) -> list[str]:
    taken: list[str] = []
    while rest and len(taken) < max_words and not is_flag(rest[0]):
        taken.append(rest.pop(0))
    return taken


def _record(words: Words, option: GivenSetting, setting: Setting | None, negated: bool) -> None:
    if option.name == CONFIG and setting is None:
        if option.texts:
            words.configs.append(option.texts[0])
        else:
            words.without_value.append(option)
    elif setting is None:
        words.options.append(option)
    elif negated:
        # --no-x has a value by itself; an opposite name such as --disable_x may be given one
        is_no_form = option.written.lstrip("-").startswith("no")
        if is_no_form and option.texts:
            words.negated_with_value.append(option)
        else:
            words.options.append(GivenSetting(option.written, option.name, negate(option.texts), option.origin))
    elif option.texts:
        words.options.append(option)
    elif setting.is_switch:
        words.options.append(GivenSetting(option.written, option.name, ("true",), option.origin))
    elif "bare" in setting.metadata:
        words.options.append(GivenSetting(option.written, option.name, (setting.metadata["bare"],), option.origin))
    else:
        words.without_value.append(option)
