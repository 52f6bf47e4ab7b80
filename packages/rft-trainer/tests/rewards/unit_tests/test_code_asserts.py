"""Asserts become calls with expected results; one of another form is refused, with the reason."""

from __future__ import annotations

import pytest

from rft_trainer.rewards.unit_tests.code_asserts import AssertedCall, CodeTestError, asserted_calls
from rft_trainer.sandbox.values import Closeness


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("assert add(1, -2) == -1", AssertedCall("add", [1, -2], {}, -1)),
        ("assert 'b' == last(['a', 'b'])", AssertedCall("last", [["a", "b"]], {}, "b")),
        ("assert f(x={1: (2,)}) == {3, 4}", AssertedCall("f", [], {"x": {1: (2,)}}, {3, 4})),
        ("assert f() is None", AssertedCall("f", [], {}, None)),
        ("assert f() == None, 'why'", AssertedCall("f", [], {}, None)),
        ("assert f('a')", AssertedCall("f", ["a"], {}, truth=True)),
        ("assert not f('a')", AssertedCall("f", ["a"], {}, truth=False)),
        ("assert abs(f(3) - 0.5) < 1e-6", AssertedCall("f", [3], {}, 0.5, closeness=Closeness(0.0, 1e-6))),
        ("assert abs(0.5 - f(3)) <= 0.1", AssertedCall("f", [3], {}, 0.5, closeness=Closeness(0.0, 0.1))),
        (
            "import math\nassert math.isclose(f(3), 0.5, rel_tol=0.001)",
            AssertedCall("f", [3], {}, 0.5, closeness=Closeness(0.001, 0.0)),
        ),
    ],
)
def test_an_assert_of_a_call_is_read(text: str, call: AssertedCall) -> None:
    assert asserted_calls(text) == [call]


def test_the_check_of_humaneval_is_read_with_its_entry_point() -> None:
    text = "METADATA = {'author': 'x'}\n\n\ndef check(candidate):\n    assert candidate(1) == 2\n"
    text += "    assert candidate([]) == []\n"
    assert [(call.name, call.expected) for call in asserted_calls(text, "grow")] == [("grow", 2), ("grow", [])]
    with pytest.raises(CodeTestError, match="needs the column entry_point"):
        asserted_calls(text)


@pytest.mark.parametrize(
    "text",
    [
        "assert set(f([1])) == set([1])",
        "assert f(g(2)) == 1",
        "assert f(1) == g(1)",
        "assert f(*[1]) == 1",
        "assert f(**{'a': 1}) == 1",
        "assert a.f(1) == 1",
        "assert 1 < f(1) < 3",
        "assert f(1) != 3",
        "assert f(1) is 257 + x",
        "for i in range(3):\n    assert f(i) == i",
        "__import__('os').system('true')",
        "x = 3",
        "assert True",
        "assert abs(f(1), 2) < 3",
        "assert math.isclose(f(1), 2, rel_tol=x)",
    ],
)
def test_any_other_statement_is_refused_with_its_text_and_the_forms(text: str) -> None:
    with pytest.raises(CodeTestError, match="is not of a form that can be judged outside: assert f") as caught:
        asserted_calls(text)
    assert text.splitlines()[0][:20] in str(caught.value)


@pytest.mark.parametrize("text", ["assert f( == 1", "\0", "(" * 500 + ")" * 500])
def test_what_is_no_python_is_refused(text: str) -> None:
    with pytest.raises(CodeTestError, match="is no Python"):
        asserted_calls(text)
