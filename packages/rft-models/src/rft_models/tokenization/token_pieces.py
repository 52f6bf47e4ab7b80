"""Texts of single tokens, for pages that show them one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\ufffd"
_CONTEXT = 8
"""Tokens before a piece that are decoded with it: whether a word begins with a space is seen beside the word before."""


def token_pieces(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds; together they are the decoded text.

    A character of several tokens belongs to the last of them, and the others add nothing.

    Args:
        decode: of a tokenizer, from ids to text.
        token_ids: of one text, in order.
    """
    pieces: list[str] = []
    # every character before this token is complete
    border = 0
    for index in range(len(token_ids)):
        start = max(0, border - _CONTEXT)
        before, after = decode(token_ids[start:border]), decode(token_ids[start : index + 1])
        # at the end what is not whole is shown as the tokenizer shows it
        if after.endswith(_UNFINISHED) and index + 1 < len(token_ids):
            pieces.append("")
            continue
        pieces.append(after[len(before) :])
        border = index + 1
    return pieces
