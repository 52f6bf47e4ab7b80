r"""Cells that hold a list as Python writes it, such as `[3, 14]` or `['a saw', "it's"]`.

They are read by a grammar of their own, in time linear in their length: nothing is evaluated, and a list in a list is
no cell of these formats.
"""

from __future__ import annotations

import re

_NUMBERS = re.compile(r"\[[ \t]*(?:\d{1,12}(?:[ \t]*,[ \t]*\d{1,12})*)?[ \t]*\]")
_TEXT = re.compile(r"""[ \t\n]*(?:'((?:[^'\\\n]|\\.)*)'|"((?:[^"\\\n]|\\.)*)")[ \t\n]*(,|\])""")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_LAST_CODE_POINT = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)


def parse_numbers(cell: str) -> tuple[int, ...] | None:
    """Return the numbers of a cell such as `[3, 14]`, each 0 or more; None where it is something else."""
    text = cell.strip()
    if not _NUMBERS.fullmatch(text):
        return None
    inner = text[1:-1].strip()
    return tuple(map(int, inner.split(","))) if inner else ()


def parse_texts(cell: str) -> tuple[str, ...] | None:
    """Return the texts of a cell such as `['a saw', "it's"]`; None where it is something else."""
    text = cell.strip()
    if not text.startswith("["):
        return None
    if not text[1:-1].strip() and text.endswith("]") and len(text) > 1:
        return ()
    texts: list[str] = []
    position = 1
    while found := _TEXT.match(text, position):
        plain = _unescaped(found[1] if found[1] is not None else found[2])
        if plain is None:
            return None
        texts.append(plain)
        position = found.end()
        if found[3] == "]":
            return tuple(texts) if position == len(text) else None
    return None


def _unescaped(text: str) -> str | None:
    """Return a text with its escapes replaced; None where one stands for no character."""
    if "\\" not in text:
        return text
    codes = [int(hexa or hexb or hexc, 16) for hexa, hexb, hexc, _ in _ESCAPE.findall(text) if hexa or hexb or hexc]
    if any(code > _LAST_CODE_POINT or code in _SURROGATES for code in codes):
        return None
    return _ESCAPE.sub(_character, text)


def _character(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    return chr(int(code, 16)) if code else _LETTERS.get(found[4], found[0])
