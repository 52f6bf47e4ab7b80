"""Values of the cage are compared as Python's `==` compares them, without becoming objects of anybody's class."""

from __future__ import annotations

from typing import Any

import pytest

from rft_trainer.sandbox.cage_main import encode
from rft_trainer.sandbox.values import Closeness, MalformedValueError, equal, truth


def same(a: Any, b: Any, *, sequences_alike: bool = False, closeness: Closeness | None = None) -> bool:
    return equal(encode(a), encode(b), closeness=closeness or Closeness(), sequences_alike=sequences_alike)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 1.0),
        (True, 1),
        (0.1 + 0.2, 0.3),
        ({1, 2.0}, {2, 1}),
        ({"a": [1, 0.1 + 0.2], 1: ()}, {1.0: (), "a": [1, 0.3]}),
        (10**30, 10**30),
        (frozenset([(1, "x")]), {(1, "x")}),
        (2 + 0j, 2),
        (None, None),
        (b"a", b"a"),
    ],
)
def test_what_python_calls_equal_is_equal(a: Any, b: Any) -> None:
    assert same(a, b)
    assert same(b, a)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 2),
        ("1", 1),
        ([1], (1,)),
        ([1, 2], [1]),
        (None, False),
        (float("nan"), float("nan")),
        (10**400, 1.0),
        ({1}, [1]),
        ({1: 2}, {1: 3}),
        ({1: 2}, {2: 2}),
        ("a", b"a"),
        (1e-3, 1.1e-3),
        (2**53 + 1, 2**53),
        ([True, []], [True, {}]),
    ],
)
def test_what_python_calls_different_is_different(a: Any, b: Any) -> None:
    assert not same(a, b)
    assert not same(b, a)


def test_a_tuple_is_a_list_for_rows_of_json_alone() -> None:
    assert same((1, [2, (3,)]), [1, [2, [3]]], sequences_alike=True)
    assert not same((1, [2, (3,)]), [1, [2, [3]]])


def test_floats_are_as_close_as_a_test_asks() -> None:
    wide = Closeness(0.0, 0.1)
    assert same(1.05, 1.0, closeness=wide)
    assert not same(1.2, 1.0, closeness=wide)
    assert not same(1, 2, closeness=Closeness(0.0, 5.0))  # whole numbers are exact


@pytest.mark.parametrize("value", [None, 0, 0.0, "", [], {}, b"", 0j, 1, -0.5, "a", [0], {0: 0}, {0}])
def test_the_truth_of_a_value_is_that_of_bool(value: Any) -> None:
    assert truth(encode(value)) is bool(value)


@pytest.mark.parametrize(
    ("claimed", "expected"),
    [
        (None, 1),
        ([], 1),
        (["int"], 1),
        (["int", 5], 5),
        (["int", "five"], 5),
        (["float", "0x1p99999"], 1),
        (["bool", 1], 1),
        (["list", "a"], ["a"]),
        (["dict", [[["int", "0x1"]]]], {1: 1}),
        (["complex", ["1"] * 3], 1j),
        (["object", {}], 1),
        ({"a": 1}, 1),
        ([["list"], []], []),
        (["set", [["set"]]], {1}),
    ],
)
def test_what_is_no_value_is_malformed(claimed: Any, expected: Any) -> None:
    with pytest.raises(MalformedValueError):
        equal(claimed, encode(expected), closeness=Closeness(), sequences_alike=False)


def test_numbers_that_collide_cost_no_more_than_others() -> None:
    # all have the same hash: a set of them would compare each with each
    many = [["int", hex(n * (2**61 - 1))] for n in range(20_000)]
    assert not equal(["set", many], ["set", many[1:]], closeness=Closeness(), sequences_alike=False)
