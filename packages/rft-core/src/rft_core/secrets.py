"""Nothing that looks like a key or a password is shown or written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import cast

HIDDEN = "(hidden: looks like a secret)"

_SECRET_NAME = re.compile(r"(?:^|[_-])(?:api[_-]?key|access[_-]?key|token|secret|password|passwd|credentials?)$", re.I)
_SECRET_TEXT = re.compile(
    r"""\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|wandb_v\d_[A-Za-z0-9_]{16,}
        |AKIA[0-9A-Z]{12,}|local-[0-9a-f]{32,}|(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f]))\b
        |(?<=[Bb]earer\ )\S{8,}
        |(?<=://)[^/\s:@]+:[^/\s@]+(?=@)""",
    re.X,
)


def looks_like_key(text: str) -> bool:
    """Return whether `text` is more likely a key than a name that a person would choose."""
    return bool(_SECRET_TEXT.search(text)) or bool(re.fullmatch(r"[0-9a-fA-F]{32,}", text.strip()))


def scrub_text(text: str) -> str:
    """`text` with every key, bearer token and password of an address hidden."""
    return _SECRET_TEXT.sub(HIDDEN, text)


def scrub_command(argv: Sequence[str]) -> list[str]:
    """Arguments with the values of secret flags and everything that looks like a key hidden."""
    shown: list[str] = []
    hide_next = False
    for argument in argv:
        flag, equals, _ = argument.partition("=")
        is_secret_flag = flag.startswith("--") and _SECRET_NAME.search(flag) is not None
        # a secret flag may stand without a value: then another flag follows
        if hide_next and not argument.startswith("--"):
            shown.append(HIDDEN)
        elif is_secret_flag and equals:
            shown.append(f"{flag}={HIDDEN}")
        else:
            shown.append(scrub_text(argument))
        hide_next = is_secret_flag and not equals
    return shown


def scrub(value: object) -> object:
    """A JSON-like value with secrets hidden, by the names of its keys and by its texts."""
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, object]", value).items()
        return {str(key): HIDDEN if _is_secret(str(key), item) else scrub(item) for key, item in pairs}
    if isinstance(value, str):
        return scrub_text(value)
    if isinstance(value, Sequence):
        return [scrub(item) for item in cast("Sequence[object]", value)]
    return value


def _is_secret(name: str, value: object) -> bool:
    return bool(value) and isinstance(value, str) and _SECRET_NAME.search(name) is not None
