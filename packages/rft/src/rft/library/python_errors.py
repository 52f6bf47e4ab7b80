"""Errors of a run in the words of a program: its rows in place of the file they were written to, keywords for flags."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

from rft.config.rules.sourced_values import as_keywords
from rft.library.given_rows import rows_directory
from rft_core.errors import Problem, RftError

_ROW_ID = re.compile(r"(\w+)-[0-9a-f]{16}:(\d+)")
"""A row as prompts and samples are named: after the file and its index."""
_PROGRAM = re.compile(r"\b(?:rft-train|torchrun|srun|uv)\b")
_VALUE = r"(?: [^\s,;)-](?:[^\s,;)]|,(?=\w))*)?"
_ASSIGNED = re.compile(rf"--[a-z]\w+{_VALUE}(?: --[a-z]\w+{_VALUE})*")
"""Flags in a row, with one value each or none."""
_FLAG = re.compile(r"--([a-z]\w+)")
_DESCRIBED = re.compile(r"--([a-z]\w+)(?= with )")
"""A flag whose value is described, and not given."""


@contextmanager
def python_words() -> Generator[None]:
    """Let errors name `data[4]['label']` and `label_key=...`, where those of a command name a file and flags."""
    try:
        yield
    except RftError as error:
        error.reword(_in_python)
        raise


def _in_python(problem: Problem) -> Problem:
    what, where, why, do = map(_with_rows, (problem.what, problem.where, problem.why, problem.do))
    if _PROGRAM.search(do):  # a command to type, whose flags are flags
        return replace(problem, what=what, where=where, why=why, do=do)
    do = _ASSIGNED.sub(lambda flag: as_keywords(flag[0]), _DESCRIBED.sub(r"\1", do))
    where = _FLAG.sub(r"keyword argument \1", where)
    return replace(problem, what=_named(what), where=where, why=_named(why), do=do)


def _named(text: str) -> str:
    return _FLAG.sub(r"\1", text)


def _with_rows(text: str) -> str:
    """Return the text with rows of the argument where it has lines of the file that was made of them."""
    return _ROW_ID.sub(r"\1[\2]", _place().sub(lambda found: _row(*found.groups()), text))


def _place() -> re.Pattern[str]:
    # the directory is that of the environment, which a program may change
    return re.compile(re.escape(f"{rows_directory()}/") + r"(\w+)-[0-9a-f]{16}\.jsonl(?::(\d+))?(?::(\w+))?")


def _row(name: str, line: str | None, column: str | None) -> str:
    index = f"[{int(line) - 1}]" if line else ""
    return name + index + (f"[{column!r}]" if column else "")
