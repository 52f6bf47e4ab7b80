r"""Text from outside as a terminal may show it: what would steer the terminal stands there as visible marks.

A reward server, a model, a data file or a name on the disk can hold escape sequences, which move the cursor, hide text
or set the title, and marks that turn the direction of writing. Where they stand, a person reads `\x1b[2J`, as Python
writes it. Files and JSON keep the text as it is.
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
