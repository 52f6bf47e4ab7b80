"""Unit tests of a row in the forms in which data sets publish them, and what each makes of a reply."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rft_trainer.rewards.unit_tests.code_asserts import CodeTestError
from rft_trainer.rewards.unit_tests.code_tests import label_problem, read_tests
from rft_trainer.sandbox.cage_main import encode


def failures(label: Any, *values: Any) -> list[str]:
    """What the tests of the label say of these results."""
    tests = read_tests(label)
    return [test.failure({"value": encode(value)}) for test, value in zip(tests, values, strict=True)]


def test_calls_are_compared_with_what_is_expected_and_send_none_of_it_into_the_cage() -> None:
    label = [
        {"call": "f", "args": [1, "a"], "kwargs": {"k": [2]}, "expected": [1, 77]},
        {"call": "g", "expected": 77},
    ]
    first, second = read_tests(label)
    assert first.request == {"call": "f", "args": [encode(1), encode("a")], "kwargs": [["k", encode([2])]]}
    assert second.request == {"call": "g", "args": [], "kwargs": []}
    assert "77" not in json.dumps([first.request, second.request])
    assert hex(77) not in json.dumps([first.request, second.request])
    assert failures(label, (1, 77), 77.0) == ["", ""]
    assert failures(label, [1, 78], "77") == ["returned something else"] * 2


def test_programs_are_compared_by_the_lines_that_they_print() -> None:
    for label in (
        [{"stdin": "1\n", "stdout": "2\n3"}],
        {"inputs": ["1\n"], "outputs": ["2\n3\n"]},
        {"inputs": [["1", ""]], "outputs": [["2", "3"]]},
        json.dumps({"inputs": ["1\n"], "outputs": ["2\n3\n"]}),
    ):
        [test] = read_tests(label)
        assert test.request == {"stdin": "1\n"}
        assert test.failure({"printed": "2  \n3\n\n"}) == ""
        for output in ("2\n4\n", "2 3", "\n2\n3", "", None, 23):
            assert test.failure({"printed": output}) == "printed something else"
        assert test.failure({"value": encode("2\n3")}) == "printed something else"


def test_functions_of_apps_and_verl_have_results_bare_or_in_a_list() -> None:
    label = {"inputs": [[1, [2]], [3, 4]], "outputs": [[[5]], 6], "fn_name": "g"}
    assert [test.request["call"] for test in read_tests(label)] == ["g", "g"]
    for first in ([[5]], [5]):
        assert failures(label, first, 6) == ["", ""]
    assert failures(label, 5, 7) == ["returned something else"] * 2
    lines = {"inputs": ['1\n[2, "x"]\n'], "outputs": ["[true]"], "fn_name": "g"}
    [test] = read_tests(lines)
    assert test.request["args"] == [encode(1), encode([2, "x"])]
    assert test.failure({"value": encode([True])}) == ""


def test_asserts_are_read_from_a_list_or_a_text_and_keep_tuples_apart() -> None:
    for label in (["assert f(1) == (1, 2)"], "assert f(1) == (1, 2)", '["assert f(1) == (1, 2)"]'):
        assert failures(label, (1, 2)) == [""]
        assert failures(label, [1, 2]) == ["returned something else"]
    [test] = read_tests("def check(candidate):\n    assert candidate(1)\n", "own")
    assert (test.request["call"], test.failure({"value": encode([0])})) == ("own", "")
    assert test.failure({"value": encode([])}) == "returned something else"
    [near] = read_tests(["assert abs(f(1) - 0.5) < 1e-2"])
    assert (near.failure({"value": encode(0.505)}), bool(near.failure({"value": encode(0.6)}))) == ("", True)


@pytest.mark.parametrize("reply", [{}, {"value": None}, {"value": [["x"]]}, {"value": ["int", "x"]}, {"passed": True}])
def test_a_reply_that_is_no_value_fails(reply: Any) -> None:
    [test] = read_tests([{"call": "f", "expected": 1}])
    assert test.failure(reply) == "returned nothing that can be read"
    assert test.failure(None) == "no result"
    assert test.failure({"error": "ValueError: " + "x" * 999})[:15] == "ValueError: xxx"
    assert len(test.failure({"error": "x" * 999})) == 200


def test_a_reply_that_is_nested_without_end_fails() -> None:
    deep: Any = ["int", "0x1"]
    for _ in range(5000):
        deep = ["list", [deep]]
    [test] = read_tests([{"call": "f", "expected": 1}])
    assert test.failure({"value": deep}) == "returned something else"
    nested: Any = [[[[1]]]]
    for _ in range(70):
        nested = [nested]
    with pytest.raises(CodeTestError, match="nested more than 64"):
        read_tests([{"call": "f", "expected": nested}])


@pytest.mark.parametrize(
    ("label", "words"),
    [
        (None, "there are no tests"),
        ([], "there are no tests"),
        (7, "there are no tests"),
        ("", "holds no assert"),
        ("[1", "no JSON"),
        ([{"call": "f"}], "test 1: it has call; a test has"),
        ([{"call": "f", "expected": 1, "input": 2}], "test 1: it has call, expected, input"),
        ([{"call": "f", "expected": 1}, {"stdin": "x"}], "test 2: it has stdin"),
        ([{"call": 3, "expected": 1}], "test 1: call is a name"),
        ([{"call": "f", "args": 3, "expected": 1}], "args a list"),
        ([{"call": "f", "expected": 1}, "assert f(1) == 2"], "test 2: str in the place of a mapping"),
        ([{"stdin": 3, "stdout": ""}], "test 1: input and output of a program are texts"),
        ({"inputs": [], "outputs": []}, "of the same length, which is 1 or more"),
        ({"inputs": ["a"], "outputs": ["a", "b"]}, "of the same length"),
        ({"inputs": ["a"]}, "of the same length"),
        ({"inputs": [3], "outputs": [3], "fn_name": "f"}, "test 1: the arguments of f are no list"),
        ({"inputs": ["x"], "outputs": [3], "fn_name": "f"}, "test 1: 'x' is no JSON value"),
        (["assert set(f(1)) == {1}"], "form that can be judged outside"),
    ],
)
def test_tests_that_cannot_be_read_are_refused_with_their_number_and_the_reason(label: Any, words: str) -> None:
    with pytest.raises(CodeTestError, match=words.replace("[", r"\[")):
        read_tests(label)


def test_a_row_is_read_with_the_name_of_its_function() -> None:
    text = "def check(candidate):\n    assert candidate(1)\n"
    assert label_problem(text, {"entry_point": "f"}) == ""
    assert "needs the column entry_point" in label_problem(text, {})
    assert "there are no tests" in label_problem(None, {"entry_point": "f"})
