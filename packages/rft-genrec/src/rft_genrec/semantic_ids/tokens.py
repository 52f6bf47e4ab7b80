"""Codes as tokens: `<a_12><b_200><c_7>`, a letter a level."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from string import ascii_lowercase

_TOKEN = re.compile(r"<([a-z])_(\d+)>")


def token(level: int, code: int) -> str:
    """Return the token of a code; levels are counted from 0, and so are codes."""
    return f"<{ascii_lowercase[level]}_{code}>"


def tokens_of(codes: Iterable[int]) -> tuple[str, ...]:
    """Return the tokens of one ID."""
    return tuple(token(level, code) for level, code in enumerate(codes))


def codes_of(tokens: Sequence[str]) -> tuple[int, ...] | None:
    """Return the codes of one ID; None where its tokens have another form, or levels in another order."""
    found = [_TOKEN.fullmatch(text) for text in tokens]
    if not all(match and match[1] == ascii_lowercase[level] for level, match in enumerate(found)):
        return None
    return tuple(int(match[2]) for match in found if match)
