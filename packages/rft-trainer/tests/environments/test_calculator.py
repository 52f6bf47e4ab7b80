"""Values and limits of the calculator's expressions, and what a turn of an episode earns."""

from __future__ import annotations

import pytest

from rft_trainer.environments.calculator import SCHEMA, Calculator, evaluate, shown
from rft_trainer.environments.protocol import Answer, AssistantTurn, EnvironmentPrompt, ToolCall

NINES = "9" * 60


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1+2*3-4/2", "5"),
        ("2*(3+4)*5", "70"),
        ("8/2*4", "16"),
        ("7-2+1", "6"),
        ("--3", "3"),
        ("-(1-3)", "2"),
        ("1.25*4", "5"),
        ("1/8", "0.125"),
        ("1/20", "0.05"),
        ("1/25", "0.04"),
        ("-1/4", "-0.25"),
        ("0-5/2", "-2.5"),
        ("3/7", "3/7"),
        ("-3/7", "-3/7"),
        ("1/30", "1/30"),
        ("1/4096", "0.000244140625"),
        ("1/8192", "1/8192"),
        ("(" * 32 + "1" + ")" * 32, "1"),
        ("-" * 32 + "1", "1"),
        ("+".join(["1"] * 100) + " ", "100"),
        (f"{NINES}*1", NINES),
        (f"0-{NINES}", f"-{NINES}"),
        (f"1/{NINES}", f"1/{NINES}"),
    ],
)
def test_an_expression_is_computed_exactly_and_shown_short(text: str, value: str) -> None:
    assert shown(evaluate(text)) == value


@pytest.mark.parametrize(
    "text",
    [
        "(" * 33 + "1" + ")" * 33,
        "-" * 33 + "1",
        "+".join(["1"] * 101),
        "1" * 201,
        f"{NINES}+1",
        f"0-{NINES}-1",
        f"1/1{'0' * 60}",
        "(1",
        "(1]",
        "1)",
        "*1",
        ")",
        "+1",
        "1 2",
        "",
    ],
)
def test_what_is_too_long_too_deep_too_large_or_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        evaluate(text)


def test_a_division_by_zero_is_one() -> None:
    with pytest.raises(ZeroDivisionError):
        evaluate("1/(2-2)")


def earned(label: str | None, text: str) -> Answer:
    game = Calculator()
    assert game.reset(EnvironmentPrompt("p", "?", label), 0) == ()
    return game.step(AssistantTurn(text))


@pytest.mark.parametrize(
    ("label", "text", "right"),
    [
        ("0.5", "first 3, then 1/2", True),
        ("so 42", "42.0", True),
        ("-3", "it is -3", True),
        ("3", "it is -3", False),
        ("42", "42 or 43", False),
        ("42", "none", False),
        (None, "none", False),
        (None, "1", False),
        ("1/0", "1/0", False),
        ("1", "1/0", False),
        (NINES, NINES, True),
        (f"1{NINES}", f"1{NINES}", False),
    ],
)
def test_the_last_number_of_a_turn_without_calls_is_compared(label: str | None, text: str, right: bool) -> None:
    reward = float(right)
    assert earned(label, text) == Answer(reward=reward, done=True, parts={"correctness": reward})


def test_every_call_has_its_result_and_the_episode_goes_on() -> None:
    game = Calculator()
    game.reset(EnvironmentPrompt("p", "?", "1"), 0)
    calls = [
        ToolCall("calculator", {"expression": "6*7", "input": "1"}),
        ToolCall("", {"input": "1+1"}),
        ToolCall("phone", {"expression": "1"}),
        ToolCall("calculator", {"expression": 3}),
        ToolCall("calculator", {}),
        ToolCall("calculator", {"expression": "1/0"}),
        ToolCall("calculator", {"expression": "x"}),
    ]
    answer = game.step(AssistantTurn("1", tuple(calls)))
    assert answer.messages[:2] == ["42", "2"]
    assert [str(message).partition(":")[0] for message in answer.messages[2:]] == ["error"] * 5
    assert (answer.reward, answer.done, answer.parts) == (0.0, False, {})
    assert Calculator.tools == (SCHEMA,)
