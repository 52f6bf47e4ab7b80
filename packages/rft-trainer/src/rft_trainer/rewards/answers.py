"""Extraction of the final answer from a text, and its value where it is a number.

An answer is marked: the rest of the line after `####`, or what is inside `\\boxed{...}`. Where a
text marks several, the last one counts. Everything here is a pure function of the text with a
bounded cost; answers that need algebra go to `math_task` in a process of its own.
"""

from __future__ import annotations

import re
from fractions import Fraction

_MARK = re.compile(r"####|\\boxed\s*\{")
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]*)?")
_UNIT = re.compile(r"(?:\s*\\?%|\s+\\text\s*\{[A-Za-z .]*\}|\s+[A-Za-z][A-Za-z .]*)")

_MAX_LENGTH = 256
_MAX_BOX = 1024
_MAX_DEPTH = 16
_LONG_NUMBER = re.compile(r"[0-9]{101}")
_TOWER = re.compile(r"\^\s*(?:[0-9A-Za-z]\s*\^|\{[^{}]*\^|\{?\s*[+-]?[0-9]{5})")
_FORBIDDEN = ('"', "`", "@", "__", "\0")


def marked_answers(text: str) -> list[str]:
    """Return every marked answer, in order; a box on a `####` line is one answer, an unclosed box none."""
    answers: list[str] = []
    position = 0
    while mark := _MARK.search(text, position):
        if mark.group() == "####":
            end = text.find("\n", mark.end())
            position = len(text) if end < 0 else end
            line = text[mark.end() : position].strip()
            answers.append(_inside_last_box(line) or line)
            continue
        end = _closing_brace(text, mark.end())
        if end is not None:
            answers.append(text[mark.end() : end].strip())
        # behind the box and not inside it: a box within a box is part of its answer
        position = mark.end() if end is None else end
    return answers


def label_answer(label: str) -> str:
    """Return the last marked answer of a label, or the full label where nothing is marked."""
    answers = marked_answers(label)
    return answers[-1] if answers else label.strip()


def parse_number(text: str) -> Fraction | None:
    """Parse a decimal number to its exact value, or None.

    Dollar signs around it, commas between thousands, leading zeros, a plus sign and a period at
    the end do not matter: `$1,234.`, `01234` and `1234.0` are the same number.
    """
    digits = _without_dollars(text).removesuffix(".")
    # the length first: a number of a million digits takes long to convert
    if len(digits) > _MAX_LENGTH or not _NUMBER.fullmatch(digits) or not any(c.isdigit() for c in digits):
        return None
    return Fraction(digits.replace(",", ""))


def parse_quantity(text: str) -> Fraction | None:
    """Parse a number that may have a unit in words or a percent sign: `18 dollars`, `$5 per day`, `20%`."""
    bare = _without_dollars(text)
    end = _NUMBER.match(bare)
    assert end is not None, "every part of the pattern may be absent"
    unit = bare[end.end() :].removesuffix(".")
    return parse_number(end.group()) if not unit or _UNIT.fullmatch(unit) else None


def is_readable(text: str) -> bool:
    """Return whether an answer can be compared by algebra: short, braces balanced, no tower of powers.

    A refusal depends on the text alone, so a response refused here is wrong, not unscored.
    """
    if not text or len(text) > _MAX_LENGTH or not text.isprintable():
        return False
    # numbers of more than 100 digits and towers of powers could keep algebra busy for ever
    if any(part in text for part in _FORBIDDEN) or _LONG_NUMBER.search(text) or _TOWER.search(text):
        return False
    depth = 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if not 0 <= depth <= _MAX_DEPTH:
            return False
    return depth == 0


def without_spaces(text: str) -> str:
    """Strip white space, enclosing dollar signs and the final period, to compare answers letter for letter."""
    return "".join(_without_dollars(text).removesuffix(".").split())


def _without_dollars(text: str) -> str:
    """Strip dollar signs: `$5`, `\\$5`, `$5$.`, `-$5` -> 5, 5, 5, -5."""
    bare, sign = text.strip().removesuffix("."), ""
    if bare.startswith("-") and bare[1:].lstrip().startswith(("$", "\\$")):
        bare, sign = bare[1:].lstrip(), "-"
    # the escaped sign first, or its backslash would be left over
    for dollar in ("\\$", "$"):
        bare = bare.removeprefix(dollar).removesuffix(dollar)
    return sign + bare.strip()


def _inside_last_box(line: str) -> str | None:
    inner: str | None = None
    for mark in re.finditer(r"\\boxed\s*\{", line):
        end = _closing_brace(line, mark.end())
        if end is not None:
            inner = line[mark.end() : end].strip()
    return inner


def _closing_brace(text: str, start: int) -> int | None:
    """Return the index of the brace that closes the one before `start`; None where there is none near enough.

    The search is cut short because a text of many unclosed boxes would take quadratic time.
    """
    depth = 1
    # bounded: a text of many unclosed boxes would take quadratic time
    for index in range(start, min(len(text), start + _MAX_BOX)):
        # an escaped brace is a letter of the answer
        if text[index] in "{}" and text[index - 1] != "\\":
            depth += 1 if text[index] == "{" else -1
            if depth == 0:
                return index
    return None
