r"""Text from outside as a terminal may show it: what would steer the terminal stands there as visible marks.

A reward server, a model, a data file or a name on the disk can hold escape sequences, which move the cursor, hide text
or set the title, and marks that turn the direction of writing. Where they stand, a person reads `\x1b[2J`, as Python
writes it. Such a text can also be of any length: where it stands in a message, its middle is left out. Files and JSON
keep the text as it is.
"""

from __future__ import annotations

import re

# control characters but for tab and line feed; marks of direction; line separators; halves of surrogate pairs
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Return the text with every character that would steer a terminal written as Python escapes it."""
    return _STEERING.sub(lambda match: ascii(match[0])[1:-1], text)


LONGEST_LINE = 500
"""Characters of a line of a message: of four fields of one line they are two thousand."""
LONGEST_FIELD = 4_000
"""Characters of a field that is a table, as of ranks that differ."""
MOST_LINES = 40
_HEAD, _TAIL = 300, 150
_INDENT = "    "


def bounded(text: str) -> str:
    """Return the text as a field of a message: visible, and of bounded length.

    Of a line of more than `LONGEST_LINE` characters the middle is left out, since a message has its rule at the end;
    of more than `MOST_LINES` lines or `LONGEST_FIELD` characters the last lines. Lines after the first are indented,
    so that none of them reads as a field.
    """
    lines = visible(text).split("\n")
    kept: list[str] = []
    for line in lines[:MOST_LINES]:
        line = _without_middle(line)
        if kept and sum(map(len, kept)) + len(line) > LONGEST_FIELD:
            break
        kept.append(line)
    if len(kept) < len(lines):
        kept.append(f"... {len(lines) - len(kept):,} lines left out")
    first, *rest = kept
    return "\n".join([first, *(line if line.startswith(_INDENT) else _INDENT + line for line in rest)])


def _without_middle(line: str) -> str:
    if len(line) <= LONGEST_LINE:
        return line
    left_out = len(line) - _HEAD - _TAIL
    return f"{line[:_HEAD]} ... {left_out:,} characters left out ... {line[-_TAIL:]}"
