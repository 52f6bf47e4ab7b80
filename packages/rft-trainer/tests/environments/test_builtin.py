"""The calculator computes what it is asked, nothing else; the guessing game hints."""

from __future__ import annotations

import pytest

from rft_trainer.environments.calculator import Calculator, evaluate, shown
from rft_trainer.environments.guess_number import GuessNumber
from rft_trainer.environments.protocol import Answer, AssistantTurn, EnvironmentPrompt, ToolCall, as_answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1+2*3", "7"),
        ("(1+2)*3", "9"),
        ("-2--3", "1"),
        ("7/2", "3.5"),
        ("1/3", "1/3"),
        ("0.1+0.2", "0.3"),
        (" 12 * 12 ", "144"),
        ("-(7/8)", "-0.875"),
        ("2-3-4", "-5"),
        ("8/4/2", "1"),
    ],
)
def test_expressions_have_their_exact_value(text: str, value: str) -> None:
    assert shown(evaluate(text)) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1+",
        "(1",
        "1)",
        "2**3",
        "abs(1)",
        "__import__('os')",
        "1" * 201,
        "9" * 61 + "*10",
        "(" * 50 + "1" + ")" * 50,
        "1 2",
    ],
)
def test_anything_else_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        evaluate(text)


def test_the_calculator_answers_calls_and_judges_the_rest() -> None:
    game = Calculator()
    game.reset(EnvironmentPrompt("p", "What is 6*7?", "42"), 0)
    calls = (
        ToolCall("calculator", {"expression": "6*7"}),
        ToolCall("phone", {}),
        ToolCall("calculator", {"expression": "1/0"}),
    )
    told = as_answer(game.step(AssistantTurn("", calls)), AssistantTurn("", calls))
    contents = [message["content"] for message in told.messages if not isinstance(message, str)]
    assert contents[0] == "42"
    assert "phone" in contents[1]
    assert contents[2].startswith("error:")
    assert not told.done
    assert game.step(AssistantTurn("It is 42.0")).reward == 1.0
    assert game.step(AssistantTurn("It is 43")).reward == 0.0
    assert game.step(AssistantTurn("I do not know, 1/0")).reward == 0.0


def test_the_guessing_game_hints_until_it_is_found() -> None:
    game = GuessNumber()
    game.reset(EnvironmentPrompt("p", "", "7"), 0)
    assert game.step(AssistantTurn("3")).messages == ["higher"]
    assert game.step(AssistantTurn("is it 9")).messages == ["lower"]
    assert game.step(AssistantTurn("hm")).messages == ["no number"]
    found = game.step(AssistantTurn("7"))
    assert (found.reward, found.done) == (1.0, True)


def test_without_a_label_the_number_follows_from_the_key() -> None:
    numbers: list[int] = []
    for key in (1, 1, 2, 3, 4, 5):
        game = GuessNumber()
        game.reset(EnvironmentPrompt("p", "user: a number from 20 to 23, please", None), key)
        numbers.append(next(n for n in range(20, 24) if game.step(AssistantTurn(str(n))).done))
    assert numbers[0] == numbers[1]
    assert len(set(numbers)) > 1


@pytest.mark.parametrize(
    "given", [None, "text", Answer(reward=float("nan")), Answer(messages=[{"role": "tool"}]), Answer(messages="hi")]
)
def test_an_answer_that_is_none_is_refused(given: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        as_answer(given, AssistantTurn("x"))


def test_a_text_is_the_tools_where_one_was_called() -> None:
    called = AssistantTurn("", (ToolCall("x", {}),))
    assert as_answer(Answer(["hi"]), called).messages == [{"role": "tool", "content": "hi"}]
    assert as_answer(Answer(["hi"]), AssistantTurn("x")).messages == [{"role": "user", "content": "hi"}]
