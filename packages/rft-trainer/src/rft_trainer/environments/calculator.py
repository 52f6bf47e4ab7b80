"""Calculator environment: questions whose answer is a number, with a calculator as a tool."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from rft_trainer.environments.protocol import Answer, AssistantTurn, EnvironmentPrompt, Message, ToolCall

_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?)|([-+*/()]))")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:/\d+)?")
_MAX_LENGTH = 200
_MAX_DIGITS = 60
_MAX_DEPTH = 32

SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute an expression of numbers, + - * / and parentheses.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


class Calculator:
    """Environment that answers calls with their results; a turn without calls earns 1 for the right number, else 0."""

    tools = (SCHEMA,)

    def reset(self, prompt: EnvironmentPrompt, key: int) -> Sequence[Message | str]:
        """Begin an episode; the prompt's label is the right number."""
        self._label = prompt.label or ""
        return ()

    def step(self, turn: AssistantTurn) -> Answer:
        """Return the results of the calls, or the reward of a turn without calls."""
        if turn.calls:
            return Answer(messages=[_result(call) for call in turn.calls])
        right = _last_number(turn.text) is not None and _last_number(turn.text) == _last_number(self._label)
        return Answer(reward=float(right), done=True, parts={"correctness": float(right)})


def _result(call: ToolCall) -> str:
    if call.name not in ("calculator", ""):
        return f"error: no tool is called {call.name[:40]}, there is calculator"
    expression = call.arguments.get("expression", call.arguments.get("input"))
    if not isinstance(expression, str):
        return 'error: the argument "expression" must be text'
    try:
        return shown(evaluate(expression))
    except (ValueError, ZeroDivisionError) as error:
        return f"error: {error}"


def evaluate(expression: str) -> Fraction:
    """Evaluate an expression of decimal numbers, + - * / and parentheses exactly.

    Raises:
        ValueError: something else, or longer, deeper or with larger numbers than is computed here.
        ZeroDivisionError: a division by zero.
    """
    # before it is parsed: text of a model may be of any length
    if len(expression) > _MAX_LENGTH:
        raise ValueError(f"the expression has {len(expression)} characters, at most {_MAX_LENGTH}")
    parser = _Parser(_tokens(expression))
    value = parser.sum(0)
    if parser.next is not None:
        raise ValueError(f"{parser.next!r} was not expected")
    return value


def shown(value: Fraction) -> str:
    """Format a value as a whole number, a decimal where it terminates, else numerator/denominator."""
    if value.denominator == 1:
        return str(value.numerator)
    digits = 0
    rest = value.denominator
    # a decimal terminates where 2 and 5 alone divide the denominator
    while rest % 10 == 0 or rest % 5 == 0 or rest % 2 == 0:
        rest //= 10 if rest % 10 == 0 else 5 if rest % 5 == 0 else 2
        digits += 1
    if rest != 1 or digits > 12:
        return f"{value.numerator}/{value.denominator}"
    scaled = abs(value) * 10**digits
    whole, part = divmod(int(scaled), 10**digits)
    return f"{'-' if value < 0 else ''}{whole}.{part:0{digits}d}"


class _Parser:
    """Recursive-descent parser with bounded depth and bounded numbers."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._at = tokens, 0

    @property
    def next(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self) -> str:
        if self.next is None:
            raise ValueError("the expression ends too early")
        self._at += 1
        return self._tokens[self._at - 1]

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self.next in ("+", "-"):
            value = _bounded(value + self._product(depth) if self._take() == "+" else value - self._product(depth))
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while self.next in ("*", "/"):
            # bounded at every step: repeated products grow without end in exact numbers
            value = _bounded(value * self._factor(depth) if self._take() == "*" else value / self._factor(depth))
        return value

    def _factor(self, depth: int) -> Fraction:
        # before Python's own limit, whose error would not be an answer
        if depth > _MAX_DEPTH:
            raise ValueError("the expression is nested too deep")
        token = self._take()
        if token == "-":
            return -self._factor(depth + 1)
        if token == "(":
            value = self.sum(depth + 1)
            if self._take() != ")":
                raise ValueError("a parenthesis is not closed")
            return value
        if token in "+*/)":
            raise ValueError(f"{token!r} was not expected")
        # exact: a rounded result would teach a number that is not the right one
        return Fraction(token)


def _tokens(expression: str) -> list[str]:
    tokens: list[str] = []
    position, text = 0, expression.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"{text[position:].strip()[:1]!r} is no part of an expression")
        tokens.append(match[1] or match[2])
        position = match.end()
    return tokens


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**_MAX_DIGITS:
        raise ValueError(f"a number has more than {_MAX_DIGITS} digits")
    return value


def _last_number(text: str) -> Fraction | None:
    numbers = _NUMBER.findall(text)
    if not numbers or len(numbers[-1]) > _MAX_DIGITS:
        return None
    numerator, _, denominator = numbers[-1].partition("/")
    return None if denominator and not int(denominator) else Fraction(numerator) / int(denominator or 1)
