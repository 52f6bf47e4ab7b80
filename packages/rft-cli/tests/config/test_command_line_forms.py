"""Every form of a flag as the parser reads it: what is written, what it names, its texts, and what is left over."""

from __future__ import annotations

from typing import Any

import pytest

from rft.config.origins import GivenSetting
from rft.config.schema import Setting
from rft_cli.config.command_line import is_flag, read


def row(name: str, kind: Any, **metadata: Any) -> Setting:
    return Setting(name, "group", kind, None, metadata)


ROWS = [
    *(
        row("size", int),
        row("betas", tuple[float, float]),
        row("fast", bool, aliases=("quick",)),
        row("no_limit", bool),
    ),
    *(row("track", str, bare="project"), row("path", str, aliases=("file", "folder"))),
]
SCHEMA = {setting.name: setting for setting in ROWS}
WITH_OTHER_NAMES = SCHEMA | {name: row(name, kind) for name, kind in (("enable_engine_sleep", bool),)}
WITH_OTHER_NAMES |= {"log_interval": row("log_interval", int)}
KINDS = ("options", "without_value", "negated_with_value")


def parsed(text: str, schema: dict[str, Setting] = SCHEMA) -> dict[str, Any]:
    """Every part of the parsed words that is not empty; a flag is (written, name, texts)."""
    words = read(text.split(), schema)

    def told(options: list[GivenSetting]) -> list[tuple[str, str, str]]:
        return [(option.written, option.name, " ".join(option.texts)) for option in options]

    found: dict[str, Any] = {kind: told(getattr(words, kind)) for kind in KINDS}
    found |= {"configs": words.configs, "strays": words.strays}
    return {kind: value for kind, value in found.items() if value}


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("--size 4", [("--size", "size", "4")]),
        ("--size=4", [("--size", "size", "4")]),
        ("--size=", [("--size", "size", "")]),
        ("--size -1", [("--size", "size", "-1")]),
        ("--size -.5", [("--size", "size", "-.5")]),
        ("--path -", [("--path", "path", "-")]),
        ("--betas 0.1 0.2", [("--betas", "betas", "0.1 0.2")]),
        ("--betas 0.1 --size 4", [("--betas", "betas", "0.1"), ("--size", "size", "4")]),
        ("--track", [("--track", "track", "project")]),
        ("--track mine", [("--track", "track", "mine")]),
        ("--file a --folder b", [("--file", "path", "a"), ("--folder", "path", "b")]),
        ("--fast", [("--fast", "fast", "true")]),
        ("--quick", [("--quick", "fast", "true")]),
        ("--fast no", [("--fast", "fast", "no")]),
        ("--no-fast --no_fast", [("--no-fast", "fast", "false"), ("--no_fast", "fast", "false")]),
        ("--no_limit", [("--no_limit", "no_limit", "true")]),
        ("--no-no-limit", [("--no-no-limit", "no_limit", "false")]),
        ("--no-size 1", [("--no-size", "no_size", "1")]),
        ("--sizes 1 2 3 --fast", [("--sizes", "sizes", "1 2 3"), ("--fast", "fast", "true")]),
        ("-s 1", [("-s", "s", "1")]),
        ("--logging_steps 3", [("--logging_steps", "logging_steps", "3")]),
        ("--disable_engine_sleep", [("--disable_engine_sleep", "disable_engine_sleep", "")]),
    ],
)
def test_a_flag_takes_its_own_words(text: str, options: list[tuple[str, str, str]]) -> None:
    assert parsed(text) == {"options": options}


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("--logging_steps 3", "log_interval", "3"),
        ("--logging-steps=3", "log_interval", "3"),
        ("--disable_engine_sleep", "enable_engine_sleep", "false"),
        ("--disable-engine-sleep YES", "enable_engine_sleep", "false"),
        ("--disable_engine_sleep 0", "enable_engine_sleep", "true"),
        ("--disable_engine_sleep maybe", "enable_engine_sleep", "maybe"),
        ("--no-enable_engine_sleep", "enable_engine_sleep", "false"),
        ("--file a", "path", "a"),
    ],
)
def test_other_names_and_opposites_mean_the_setting_where_a_command_has_it(text: str, name: str, value: str) -> None:
    written = text.replace("=", " ").split()[0]
    assert parsed(text, WITH_OTHER_NAMES) == {"options": [(written, name, value)]}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("", {}),
        ("word", {"strays": ["word"]}),
        ("-", {"strays": ["-"]}),
        ("-1 -.5", {"strays": ["-1", "-.5"]}),
        ("--size 4 5", {"options": [("--size", "size", "4")], "strays": ["5"]}),
        ("--betas 1 2 3", {"options": [("--betas", "betas", "1 2")], "strays": ["3"]}),
        ("--size", {"without_value": [("--size", "size", "")]}),
        ("--size --fast", {"without_value": [("--size", "size", "")], "options": [("--fast", "fast", "true")]}),
        ("--config", {"without_value": [("--config", "config", "")]}),
        ("--config a b", {"configs": ["a"], "strays": ["b"]}),
        ("--config=a --config b", {"configs": ["a", "b"]}),
        ("--no-fast true", {"negated_with_value": [("--no-fast", "fast", "true")]}),
        ("--no_fast=false", {"negated_with_value": [("--no_fast", "fast", "false")]}),
    ],
)
def test_what_is_no_flag_with_its_value_is_kept_apart(text: str, left: dict[str, Any]) -> None:
    assert parsed(text) == left


def test_every_option_keeps_the_word_that_it_was_written_as() -> None:
    options = read(["--size=4", "--fast", "--sizes", "1"], SCHEMA).options
    assert [(option.origin.kind, option.origin.text, option.is_null) for option in options] == [
        ("command line", "--size=4", False),
        ("command line", "--fast", False),
        ("command line", "--sizes", False),
    ]


@pytest.mark.parametrize(
    ("word", "flag"),
    [*((word, True) for word in ("--a", "-a", "--")), *((word, False) for word in ("-", "", "a-b", "-1", "-.1"))],
)
def test_negative_numbers_and_a_lone_dash_are_values(word: str, flag: bool) -> None:
    assert is_flag(word) is flag
