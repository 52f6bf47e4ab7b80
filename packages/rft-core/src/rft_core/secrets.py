"""Nothing that looks like a key or a password is shown or written."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import cast

HIDDEN = "(hidden: looks like a secret)"

_SECRET_NAME = re.compile(r"(?:^|[_-])(?:api[_-]?key|access[_-]?key|token|secret|password|passwd|credentials?)$", re.I)
_SECRET_TEXT = re.compile(
    r"""\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|wandb_v\d_[A-Za-z0-9_]{16,}
        |AKIA[0-9A-Z]{12,}|ASIA[0-9A-Z]{12,}|local-[0-9a-f]{32,}
        |github_pat_[A-Za-z0-9_]{16,}|gl(?:pat|dt|rt)-[A-Za-z0-9_-]{16,}|xox[abeoprs]-[A-Za-z0-9-]{10,}
        |AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{16,}|npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{16,}
        |nvapi-[A-Za-z0-9_-]{16,}|gsk_[A-Za-z0-9]{16,}|xai-[A-Za-z0-9]{16,}|r8_[A-Za-z0-9]{16,}
        |dckr_pat_[A-Za-z0-9_-]{16,}|SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}
        |eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*
        |(?<![0-9a-f@])(?<!snapshots/)[0-9a-f]{40}(?![0-9a-f]))\b
        |-----BEGIN\ [A-Z ]*PRIVATE\ KEY-----[\s\S]*?-----END\ [A-Z ]*PRIVATE\ KEY-----
        |(?<=[Bb]earer\ )(?!\(hidden)\S{8,}
        |(?<=[Bb]asic\ )(?=[A-Za-z+/]*[0-9+/=])[A-Za-z0-9+/=]{8,}
        |(?<=://)(?!\(hidden)[^/\s'"]+(?=@)""",
    re.X,
)
_NAMED_SECRET = re.compile(
    r"""(?P<name>
          (?:\b|(?<=\\[nrt])) # a word, also behind an escaped end of a line
          (?:[A-Z0-9_]*(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|_KEY)  # a variable of an environment
            |(?i:api[_-]?key|(?:access|secret|private|signing|account)[_-]?key  # a field of a request or a file
              |[a-z_]*secret|password|passwd|passphrase|(?:set-)?cookie
              |(?:access|auth|refresh|bearer|hf|api|session|bot|id)[_-]token))\b
        | (?<=[?&])(?i:[a-z_-]*(?:token|key|secret|password|signature|sig|auth))(?==)) # of a URL's query
        (?P<between>\\*["']?\s*[:=]\s*\\*["']?)(?!\(hidden)(?P<value>[^\s"',;&{}()\\]{4,})""",
    re.X,
)
_SECRET_WORDS = {
    "TOKEN",
    "TOKENS",
    "SECRET",
    "SECRETS",
    "PASSWORD",
    "PASSWD",
    "PASSPHRASE",
    "CREDENTIAL",
    "CREDENTIALS",
}
_LAST_WORDS = {"KEY", "KEYS", "APIKEY", "AUTH", "PAT", "PASS", "JWT", "COOKIE"}
_PLACES = {"FILE", "PATH", "DIR", "URL", "URI", "LIFETIME"}
"""Last words of variables that say where a secret is."""
_SHORTEST = 6
"""Characters of a variable's value that is looked for in texts: a shorter one stands in many."""


def is_secret_variable(name: str) -> bool:
    """Return whether a variable of the environment holds a secret by its name: HF_TOKEN, WANDB_API_KEY, AWS_..."""
    words = name.upper().split("_")
    return words[0] == "AWS" or bool(_SECRET_WORDS.intersection(words)) or words[-1] in _LAST_WORDS


def without_secrets(environment: Mapping[str, str], allowed: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that hold no secret by their names, and those that a pattern of `allowed` names."""
    return {
        name: value
        for name, value in environment.items()
        if not is_secret_variable(name) or any(fnmatchcase(name, pattern) for pattern in allowed)
    }


def hide_values(text: str, environment: Mapping[str, str] | None = None) -> str:
    """`text` with the values of this process's secret variables hidden, wherever they stand."""
    given = os.environ if environment is None else environment
    values = {
        value for name, value in given.items() if len(value) >= _SHORTEST and value in text and _is_own(name, value)
    }
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return text


def _is_own(name: str, value: str) -> bool:
    """Return whether the value itself is a secret: a region of AWS is none, nor is the word in SORT_KEY=response."""
    words = name.upper().split("_")
    if _SECRET_WORDS.intersection(words):
        return words[-1] not in _PLACES
    return name == "AWS_ACCESS_KEY_ID" or (words[-1] in _LAST_WORDS and not value.isalpha())


def holds_secret(name: str, value: str) -> bool:
    """Return whether a field or parameter holds a secret, by its name or by what its value looks like."""
    words = set(re.split(r"[_-]", name.upper()))
    by_name = _SECRET_WORDS | _LAST_WORDS | {"SIG", "SIGNATURE"}
    return bool(value) and (bool(words & by_name) or looks_like_key(value))


def looks_like_key(text: str) -> bool:
    """Return whether `text` is more likely a key than a name that a person would choose."""
    return bool(_SECRET_TEXT.search(text)) or bool(re.fullmatch(r"[0-9a-fA-F]{32,}", text.strip()))


def scrub_text(text: str) -> str:
    """`text` with every key, bearer token, password of an address, and value of a name for secrets hidden."""
    named = _NAMED_SECRET.sub(lambda found: f"{found['name']}{found['between']}{HIDDEN}", hide_values(text))
    return _SECRET_TEXT.sub(HIDDEN, named)


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
