"""Values of settings with their origins, as every rule gets them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rft.config.values import as_python, as_text
from rft.resolved import Origin
from rft_core.errors import Problem

Values = Mapping[str, Any]
Origins = Mapping[str, Origin]
_FLAG = re.compile(r"--\w+")
MakeProblem = Callable[[str, list[str], str, str], Problem]
"""(code, names of the settings, why, remedy) -> the problem, with values and origins filled in."""


@dataclass(frozen=True, slots=True)
class SourcedValues:
    """The settings of a command, and where each value came from."""

    values: Values
    origins: Origins

    def make_problem(self, code: str, names: list[str], why: str, do: str) -> Problem:
        """Return the problem of settings that contradict one another, with their values and origins."""
        what = ", ".join(f"{name} = {as_text(self.values[name])}" for name in names)
        where = ", ".join(f"{name}: {self.origins[name]}" for name in names)
        is_python = any(self.origins[name].kind == "keyword argument" for name in names)
        return Problem(code=code, what=what, where=where, why=why, do=as_keywords(do) if is_python else do)


def as_keywords(flags: str) -> str:
    """Return flags, switches or with one value each, as keyword arguments; anything else as it is."""
    words = flags.split()
    given: dict[str, str] = {}
    while words:
        name = words.pop(0)
        if not _FLAG.fullmatch(name):
            return flags
        given[name.removeprefix("--")] = words.pop(0) if words and not words[0].startswith("--") else "true"
    return ", ".join(f"{name}={as_python(value)}" for name, value in given.items()) or flags
