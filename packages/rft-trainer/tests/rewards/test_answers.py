from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_trainer.rewards.answers import is_readable, label_answer, marked_answers, parse_number, parse_quantity


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so\n#### 18", ["18"]),
        ("####18", ["18"]),
        ("#### 1,234\n", ["1,234"]),
        ("#### 18\nand then some", ["18"]),
        ("#### ", [""]),
        (r"\boxed{18}", ["18"]),
        (r"is \boxed{\frac{1}{2}}.", [r"\frac{1}{2}"]),
        (r"\boxed{\{1, 2\}}", [r"\{1, 2\}"]),
        (r"\boxed {7}", ["7"]),
        (r"first \boxed{1}, then \boxed{2}", ["1", "2"]),
        ("#### 1\n" + r"no: \boxed{2}", ["1", "2"]),
        (r"#### $\boxed{18}$", ["18"]),
        (r"\boxed{18", []),
        (r"\boxed{18 \boxed{19}", ["19"]),
        ("the answer is 18", []),
        ("", []),
    ],
)
def test_marked_answers_are_found_in_order(text: str, expected: list[str]):
    assert marked_answers(text) == expected


def test_the_search_for_a_closing_brace_is_bounded():
    """Unbounded, a text of nothing but open boxes takes quadratic time."""
    assert marked_answers(r"\boxed{" + "1" * 1000 + "}") == ["1" * 1000]
    assert marked_answers(r"\boxed{" + "1" * 1023 + "}") == ["1" * 1023]
    assert marked_answers(r"\boxed{" + "1" * 1024 + "}") == []
    assert marked_answers(r"\boxed{" * 5000) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("18", 18),
        ("$18", 18),
        (r"\$18", 18),
        ("$18$", 18),
        ("18.", 18),
        ("$18.", 18),
        ("$18$.", 18),
        ("1,234", 1234),
        ("1,234,567.5", Fraction(12345675, 10)),
        ("007", 7),
        ("1.0", 1),
        ("1.50", Fraction(3, 2)),
        (".5", Fraction(1, 2)),
        ("-3", -3),
        ("-$3", -3),
        ("+3", 3),
        ("0", 0),
        (" 18 ", 18),
        ("12,34", None),
        ("1,2", None),
        ("18 dollars", None),
        ("1/2", None),
        ("1e5", None),
        ("5 6", None),
        ("", None),
        (".", None),
        ("$", None),
        ("-", None),
        ("x", None),
        ("\u0664", None),
        ("-$$3", None),
        ("- $3", -3),
        (r"-\$3", -3),
        ("9" * 256, 10**256 - 1),
        ("9" * 257, None),
        ("9" * 5000, None),
    ],
)
def test_numbers_are_read_exactly_or_not_at_all(text: str, expected: Fraction | int | None):
    assert parse_number(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("18 dollars", 18),
        ("$5 per day.", 5),
        ("20%", 20),
        (r"20\%", 20),
        (r"3 \text{ cm}", 3),
        ("18", 18),
        ("18 or 19", None),
        ("18 + 2", None),
        ("eighteen", None),
        ("", None),
        ("%", None),
        ("18x", None),
    ],
)
def test_quantities_are_numbers_with_an_optional_unit(text: str, expected: int | None):
    assert parse_quantity(text) == expected


@pytest.mark.parametrize(
    ("label", "expected"), [("18", "18"), (" 18\n", "18"), ("work\n#### 18", "18"), (r"so \boxed{x+1}", "x+1")]
)
def test_a_label_is_an_answer_or_a_text_that_marks_one(label: str, expected: str):
    assert label_answer(label) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "9^{9^{9}}",
        "9^9^9",
        "2^{100000}",
        "1" * 101,
        "x" * 257,
        "{" * 17 + "}" * 17,
        "{1",
        "1}",
        'x"y',
        "x.__class__",
        "a\nb",
        "a\x00b",
    ],
)
def test_answers_that_could_harm_are_not_readable(text: str):
    assert not is_readable(text)


@pytest.mark.parametrize(
    "text",
    [
        "18",
        r"\frac{1}{2}",
        "x^{2}+1",
        "x^{10}",
        r"\{1, 2\}",
        "f'(x)",
        "(1, 2]",
        "\u03c0",
        "x" * 256,
        "{" * 16 + "}" * 16,
    ],
)
def test_ordinary_answers_are_readable(text: str):
    assert is_readable(text)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.text(alphabet="0189.,$%-+/^{}\\\\boxed# \n\x00\u0664", max_size=80))
def test_any_text_is_read_or_refused_without_an_error(text: str):
    for answer in [*marked_answers(text), label_answer(text), text]:
        number, quantity = parse_number(answer), parse_quantity(answer)
        assert number is None or number == quantity
        is_readable(answer)
