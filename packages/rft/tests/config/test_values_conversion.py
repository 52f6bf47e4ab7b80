"""Which texts are values of a setting, and what each becomes."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from rft.config.schema import Setting
from rft.config.values import NotAllowed, as_text, convert

PAIR = tuple[float, float]


def setting(kind: Any, **metadata: Any) -> Setting:
    return Setting("name", "group", kind, None, metadata)


@pytest.mark.parametrize(
    ("kind", "texts", "value"),
    [
        (float | None, ["none"], None),
        (float | None, ["NULL"], None),
        (float | None, ["0.5"], 0.5),
        (int | None, ["None"], None),
        (str, ["none"], "none"),
        (str, ["1e6"], "1e6"),
        (str, [""], ""),
        (float, ["1e6"], 1e6),
        (float, ["-2"], -2.0),
        (int, ["8"], 8),
        (int, ["-8"], -8),
        (int, ["1e6"], 1_000_000),
        (int, ["+1.E+2"], 100),
        (int, ["1.5e1"], 15),
        (Literal["a", "b"], ["b"], "b"),
        (PAIR, ["0.8", "0.9"], (0.8, 0.9)),
        (PAIR, ["0.8,0.9"], (0.8, 0.9)),
        (PAIR, ["0.8 0.9"], (0.8, 0.9)),
        (PAIR, ["[0.8, 0.9]"], (0.8, 0.9)),
        (PAIR, ["(1,", "2)"], (1.0, 2.0)),
        *[(bool, [text], True) for text in ("true", "1", "yes", "TRUE", "Yes")],
        *[(bool, [text], False) for text in ("false", "0", "no", "False", "NO")],
        (bool | None, ["none"], None),
        (bool | None, ["no"], False),
    ],
)
def test_a_text_becomes_the_value_that_it_stands_for(kind: Any, texts: list[str], value: Any) -> None:
    converted = convert(setting(kind), tuple(texts))
    assert converted == value
    assert type(converted) is type(value)


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (float | None, []),
        (float | None, ["none", "none"]),
        (float | None, ["nothing"]),
        (float, ["none"]),
        (float, ["1", "2"]),
        (float, ["inf"]),
        (float, ["nan"]),
        (int, ["1.5"]),
        (int, ["1.5e0"]),
        (int, ["1e-1"]),
        (int, ["many"]),
        (int, []),
        *[(bool, [text]) for text in ("maybe", "on", "off", "t", "y", "2")],
        (bool, ["none"]),
        (bool, ["true", "true"]),
        (str, []),
        (str, ["a", "b"]),
        (Literal["a", "b"], ["c"]),
        (PAIR, ["0.8"]),
        (PAIR, ["0.8", "0.9", "1"]),
        (PAIR, ["0.8", "nan"]),
        (PAIR, ["inf", "1"]),
        (PAIR, []),
    ],
)
def test_a_text_that_stands_for_no_value_is_not_allowed(kind: Any, texts: list[str]) -> None:
    with pytest.raises(NotAllowed):
        convert(setting(kind), tuple(texts))


@pytest.mark.parametrize(
    ("bound", "inside", "outside"),
    [
        ({"minimum": 2}, "2", "1"),
        ({"maximum": 2}, "2", "3"),
        ({"above": 2}, "3", "2"),
        ({"below": 2}, "1", "2"),
    ],
)
@pytest.mark.parametrize("kind", [int, float, int | None, PAIR])
def test_a_number_stays_within_its_bounds(kind: Any, bound: dict[str, int], inside: str, outside: str) -> None:
    count = 2 if kind is PAIR else 1
    assert convert(setting(kind, **bound), (inside,) * count) in (int(inside), (int(inside),) * 2)
    with pytest.raises(NotAllowed):
        convert(setting(kind, **bound), (outside,) * count)
    if count == 2:
        with pytest.raises(NotAllowed):
            convert(setting(kind, **bound), (inside, outside))


@pytest.mark.parametrize(("value", "text"), [("a\nb", r"'a\nb'"), ("a\nb\nc", r"'a\nb\nc'"), ("a\n", "a\n"), ("", "")])
def test_a_text_of_several_lines_is_shown_on_one(value: str, text: str) -> None:
    assert as_text(value) == text
