"""Texts of a command line or a file as values, and what is said of those that are none."""

from __future__ import annotations

from typing import Any

import pytest

from rft.config.schema import REQUIRED
from rft.config.values import allowed, as_text, example, limits


class Setting:
    """A setting of one kind."""

    def __init__(self, base: type = float, default: Any = 0.5, **more: Any) -> None:
        self.base, self.default = base, default
        self.is_pair, self.is_switch = more.pop("is_pair", False), more.pop("is_switch", False)
        self.may_be_none, self.choices = more.pop("may_be_none", False), more.pop("choices", ())
        self.metadata = more


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "none"),
        (True, "true"),
        (False, "false"),
        ((0.9, 0.95), "0.9 0.95"),
        (1e-6, "1e-06"),
        (3.0, "3"),
        (3, "3"),
        ("abc", "abc"),
    ],
)
def test_a_value_as_it_would_be_written(value: Any, text: str) -> None:
    assert as_text(value) == text


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ({}, ""),
        ({"minimum": 1}, "of at least 1"),
        ({"above": 0.0}, "above 0"),
        ({"maximum": 1.0}, "at most 1"),
        ({"below": 0.5}, "below 0.5"),
        ({"minimum": 0, "below": 1}, "of at least 0 and below 1"),
    ],
)
def test_bounds_of_a_number(bounds: dict[str, float], text: str) -> None:
    assert limits(Setting(**bounds)) == text  # type: ignore[arg-type]


def test_what_a_setting_takes() -> None:
    def told(*arguments: Any, **options: Any) -> str:
        return allowed(Setting(*arguments, **options))  # type: ignore[arg-type]

    assert told(int, 1) == "a whole number"
    assert told(float, 1.0) == "a number"
    assert told(float, (0.9, 0.95), is_pair=True) == "two numbers"
    assert told(int, 1, minimum=1) == "a whole number of at least 1"
    assert told(int, None, minimum=1, may_be_none=True) == "a whole number of at least 1, or none"
    assert told(str, "") == "text"
    assert told(str, "a", choices=("a", "b")) == "one of a, b"
    switch, optional = told(bool, True, is_switch=True), told(bool, None, is_switch=True, may_be_none=True)
    assert optional == f"{switch}, none"


@pytest.mark.parametrize(
    ("setting", "texts", "text"),
    [
        (Setting(int, 4, minimum=1), ("0",), "1"),
        (Setting(int, 4, minimum=1), ("1",), "1"),
        (Setting(int, 4, minimum=1), ("2.6",), "3"),
        (Setting(int, 4, minimum=1.5), ("1.6",), "2"),
        (Setting(int, -1, minimum=-1), ("0.5",), "1"),
        (Setting(int, -1, minimum=-1), ("-0.4",), "-1"),
        (Setting(int, 4, minimum=0), ("0.0",), "0"),
        (Setting(float, 0.5, maximum=1.0), ("1.5",), "1"),
        (Setting(float, 0.5, maximum=1.0), ("1",), "0.5"),
        (Setting(float, 0.5, maximum=1.0), ("x",), "0.5"),
        (Setting(float, 0.5, minimum=0.0), ("nan",), "0.5"),
        (Setting(float, 0.5, minimum=0.0), ("inf",), "0.5"),
        (Setting(float, 0.5, minimum=0.0), ("-1", "2"), "0.5"),
        (Setting(float, 0.5, minimum=0.0), (), "0.5"),
        (Setting(float, (0.9, 0.95), is_pair=True, minimum=0.0), ("-1",), "0.9 0.95"),
        (Setting(float, 0.5), ("7",), "0.5"),
        (Setting(int, 4), ("7.2",), "4"),
        (Setting(int, 0, minimum=0), ("one",), "1"),
        (Setting(int, 0, minimum=0), ("1,000",), "1000"),
        (Setting(int, 0, minimum=0), ("1.5k",), "1500"),
        (Setting(int, 0, minimum=0), ("50%",), "0"),
        (Setting(int, 7, minimum=2), ("one",), "7"),
        (Setting(int, 0, minimum=0), ("many",), "0"),
        (Setting(float, 0.1, maximum=1.0), ("5 %",), "0.05"),
        (Setting(str, "abc"), ("1",), "abc"),
        (Setting(str, ""), ("1",), "VALUE"),
        (Setting(str, REQUIRED), (), "PATH"),
        (Setting(float, None, minimum=0.0), ("x",), "none"),
    ],
)
def test_a_legal_value_is_near_what_was_written(setting: Any, texts: tuple[str, ...], text: str) -> None:
    assert example(setting, texts) == text
