"""What crosses the wall of the cage: values without loss, errors as lines. The limits are tested in tests/system."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rft_trainer.sandbox import cage_main

VALUES = [
    None,
    True,
    -(10**5000),
    0.1,
    float("inf"),
    1 + 2j,
    "a\n\ud800é",
    b"\x00\xff",
    [1, (2, [3]), {4}],
    {(1, 2): {"a": None}, 3: []},
    (),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_crosses_as_json_without_loss(value: Any) -> None:
    text = cage_main.dumps(cage_main.encode(value))
    assert cage_main.decode(json.loads(text)) == value
    assert cage_main.decode(cage_main.loads(text)) == value
    assert type(cage_main.decode(cage_main.loads(text))) is type(value)


def test_a_value_of_another_type_or_nested_too_deep_is_refused() -> None:
    class Always:
        def __eq__(self, other: object) -> bool:
            return True

    deep: Any = []
    for _ in range(cage_main.MAX_DEPTH + 1):
        deep = [deep]
    for value, words in ((Always(), "type Always"), ([object()], "type object"), (deep, "nested")):
        with pytest.raises(TypeError, match=words):
            cage_main.encode(value)


def test_a_subclass_crosses_as_what_it_is_made_of() -> None:
    class Liar(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    assert cage_main.encode(Liar(5)) == ["int", "0x5"]


def test_what_a_program_raises_is_a_line_whatever_its_words_do() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    def raising(error: BaseException) -> Any:
        def raises() -> None:
            raise error

        return cage_main._guarded(raises)

    assert cage_main._guarded(lambda: 3) == (3, "")
    assert raising(ZeroDivisionError("by 0")) == (None, "ZeroDivisionError: by 0")
    assert raising(Mute()) == (None, "Mute")
    assert raising(SystemExit(3)) == (None, "SystemExit: the program ended itself with 3")
    assert len(raising(ValueError("x" * 10_000))[1]) < 400


def test_a_call_finds_functions_and_methods_of_solution(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    monkeypatch.setattr(cage_main, "_PROGRAM", str(program))
    program.write_text(
        "def double(x, by=2):\n    return x * by\nclass Solution:\n    def own(self, x):\n        return -x\n"
    )
    module = cage_main._run("solution")
    monkeypatch.delitem(sys.modules, "solution")

    def called(name: str, *args: Any, **kwargs: Any) -> Any:
        given = [cage_main.encode(each) for each in args]
        named = [[key, cage_main.encode(each)] for key, each in kwargs.items()]
        return cage_main._called(module, {"call": name, "args": given, "kwargs": named})

    assert called("double", 4) == {"value": ["int", "0x8"]}
    assert called("double", 4, by=3) == {"value": ["int", "0xc"]}
    assert called("own", 4) == {"value": ["int", "-0x4"]}
    assert called("absent", 4) == {"error": "NameError: the program has no function absent"}
    assert called("double", {}) == {
        "error": "TypeError: unsupported operand type(s) for *: 'dict' and 'int' (line 2)",
    }
