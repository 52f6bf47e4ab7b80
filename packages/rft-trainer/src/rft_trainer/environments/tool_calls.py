"""Parser of tool calls in a model's text. The text is data: it is searched and read as JSON, never run."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from rft_core.errors import OptionsError
from rft_trainer.environments.protocol import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""Around the JSON of a call, as Hermes and Qwen models write it."""

MAX_CALLS = 16
"""Calls of one turn that are read; a turn with more of them is malformed."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """Well-formed calls of a turn, and the problem of each malformed one."""

    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()


class ToolCallFormat:
    """Format of tool calls: JSON between `OPEN` and `CLOSE`, or a regular expression.

    A pattern is a regular expression with the groups `arguments` and, where there are several tools, `name`; a group
    `malformed` may name what is a call gone wrong. Arguments that are a JSON object are read as such, others are
    `{"input": text}`.

    Example::

        ToolCallFormat(r"\\[(?P<name>\\w+): (?P<arguments>[^\\]]*)\\]").parse("[search: otters]").calls
    """

    def __init__(self, pattern: str = "") -> None:
        """Compile the pattern; an empty one means JSON between tags.

        Raises:
            OptionsError: a pattern that is none, or lacks the group `arguments`.
        """
        self._pattern = _compiled(pattern) if pattern else None

    def parse(self, text: str) -> ParsedTurn:
        """Parse the calls of a turn, in order."""
        parsed = _between_tags(text) if self._pattern is None else _matches(self._pattern, text)
        # none of them is made: which of so many were meant cannot be told
        if len(parsed) > MAX_CALLS:
            return ParsedTurn(problems=(f"{len(parsed)} calls in one turn, at most {MAX_CALLS}",))
        return ParsedTurn(
            tuple(one for one in parsed if isinstance(one, ToolCall)),
            tuple(one for one in parsed if isinstance(one, str)),
        )


def _between_tags(text: str) -> list[ToolCall | str]:
    parsed: list[ToolCall | str] = []
    position = text.find(OPEN)
    while position != -1:
        following = text.find(OPEN, position + len(OPEN))
        # before the next opening tag: a call that another one begins in was never closed
        end = text.find(CLOSE, position, None if following == -1 else following)
        if end == -1:
            parsed.append(f"{OPEN} without {CLOSE}")
        else:
            parsed.append(_read_call(text[position + len(OPEN) : end]))
        # on at the next opening tag, so that one bad call does not hide those behind it
        position = following
    return parsed


def _read_call(body: str) -> ToolCall | str:
    try:
        value: Any = json.loads(body)
    except ValueError as error:
        return f"not JSON: {error}"
    # brackets nested thousands deep end Python's JSON parser
    except RecursionError:
        return "not JSON that can be read: nested too deep"
    if not isinstance(value, dict):
        return f"wanted a JSON object, got {type(value).__name__}"
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not name:
        return 'no "name" of a tool'
    if not isinstance(arguments, dict):
        return f'"arguments" must be a JSON object, they are {type(arguments).__name__}'
    return ToolCall(name, arguments)


def _matches(pattern: re.Pattern[str], text: str) -> list[ToolCall | str]:
    parsed: list[ToolCall | str] = []
    for match in pattern.finditer(text):
        groups = match.groupdict()
        if groups.get("malformed") is not None:
            parsed.append(f"not a call: {groups['malformed'][:80]!r}")
        elif groups["arguments"] is not None:
            parsed.append(ToolCall(groups.get("name") or "", _arguments(groups["arguments"])))
    return parsed


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {"input": text}
    return value if isinstance(value, dict) else {"input": text}


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
        lacking = "arguments" not in compiled.groupindex
        why = "it has no group (?P<arguments>...), for the arguments of the tool"
    except re.error as error:
        compiled, lacking, why = re.compile(""), True, f"it is not a regular expression: {error}"
    if lacking:
        raise OptionsError(
            code="environment.tool_call_pattern",
            what=f"tool_call_pattern = {pattern}",
            where="--tool_call_pattern",
            why=why,
            state="nothing was started",
            do=r"--tool_call_pattern '\[(?P<name>\w+): (?P<arguments>[^\]]*)\]'",
        )
    return compiled
