"""Tool calls are found in whatever a model writes; what cannot be read is said, never guessed."""

from __future__ import annotations

import random

import pytest

from rft_core.errors import OptionsError
from rft_trainer.environments.protocol import ToolCall
from rft_trainer.environments.tool_calls import MAX_CALLS, ParsedTurn, ToolCallFormat

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'


def test_calls_are_read_in_order() -> None:
    found = ToolCallFormat().parse(f'first {CALL} then <tool_call>\n{{"name": "now"}}\n</tool_call>')
    assert found.calls == (ToolCall("calculator", {"expression": "1+1"}), ToolCall("now", {}))
    assert found.problems == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('<tool_call>{"name": "x"', "without </tool_call>"),
        ('<tool_call>{"name": "x"</tool_call>', "not JSON"),
        ("<tool_call>[1]</tool_call>", "wanted a JSON object, got list"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'no "name"'),
        ('<tool_call>{"name": 3}</tool_call>', 'no "name"'),
        ('<tool_call>{"name": ""}</tool_call>', 'no "name"'),
        ('<tool_call>{"name": "x", "arguments": "1+1"}</tool_call>', "they are str"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "nested too deep"),
        (CALL * (MAX_CALLS + 1), f"at most {MAX_CALLS}"),
        (f"<tool_call> oh {CALL}", "without </tool_call>"),
    ],
)
def test_a_call_that_cannot_be_read_is_said(text: str, said: str) -> None:
    found = ToolCallFormat().parse(text)
    assert any(said in problem for problem in found.problems)


def test_a_call_that_is_not_closed_hides_none_behind_it() -> None:
    found = ToolCallFormat().parse(f"<tool_call>{CALL}</tool_call>{CALL}<tool_call>")
    assert len(found.calls) == 2
    assert len(found.problems) == 2, "the first and the last"


def test_a_text_without_a_call_attempts_nothing() -> None:
    assert ToolCallFormat().parse("the answer is 4 </tool_call>") == ParsedTurn()


def test_a_pattern_names_tool_and_arguments() -> None:
    calls = ToolCallFormat(r"\[(?P<name>\w+): (?P<arguments>[^\]]*)\]|(?P<malformed>\[\w*\])")
    found = calls.parse('[search: otters] and [add: {"a": 1}] and [oops]')
    assert found.calls == (ToolCall("search", {"input": "otters"}), ToolCall("add", {"a": 1}))
    assert found.problems == ("not a call: '[oops]'",)


@pytest.mark.parametrize("pattern", ["(", "no groups"])
def test_a_pattern_that_cannot_be_used_is_refused(pattern: str) -> None:
    with pytest.raises(OptionsError) as caught:
        ToolCallFormat(pattern)
    assert caught.value.problem.code == "environment.tool_call_pattern"


def test_noise_never_raises() -> None:
    draw, pieces = (
        random.Random(0),
        ["<tool_call>", "</tool_call>", '{"name": "x"}', '"', "\\u12", "{", "}", "[", "é", "1e999"],
    )
    seen: set[tuple[bool, bool]] = set()
    for _ in range(3_000):
        text = "".join(draw.choice(pieces) for _ in range(draw.randint(0, 12)))
        found = ToolCallFormat().parse(text)
        # each opened call is read or is said, none is lost
        assert bool(found.calls or found.problems) == ("<tool_call>" in text), text
        assert all(call.name == "x" for call in found.calls)
        seen.add((bool(found.calls), bool(found.problems)))
    assert {(False, False), (False, True), (True, False)} <= seen, "the noise has all kinds of texts"


def test_sixteen_calls_of_a_turn_are_made_and_of_one_more_none() -> None:
    found = ToolCallFormat().parse(CALL * 16)
    assert (len(found.calls), found.problems) == (16, ())
    found = ToolCallFormat().parse(CALL * 17)
    assert (found.calls, len(found.problems)) == ((), 1)
