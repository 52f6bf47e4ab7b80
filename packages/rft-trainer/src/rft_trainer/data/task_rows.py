"""Rows of an installed task, named TASK:ARGUMENT where the path of a file stands otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from rft_core.errors import OptionsError
from rft_trainer.data.readers.rows import Row, shown
from rft_trainer.installed_tasks.discovery import (
    bad_result,
    called,
    entry_text,
    find_task,
    package_of,
    task_names,
    unknown_task,
)

_FLAG = "--prompt_data, --eval_data"


_FORM = re.compile(r"([\w.-]+):[^/]*")


def is_task(path: str) -> bool:
    """Return whether a source is TASK:ARGUMENT with the name of an installed task; the argument may be empty."""
    name, colon, _ = path.partition(":")
    return bool(colon) and name in task_names()


def refuse_unknown_task(path: str) -> None:
    """Refuse a source in the form of a task that is neither an installed one nor a file.

    Raises:
        OptionsError: no task of this name is installed.
    """
    written = _FORM.fullmatch(path)
    if written is None or is_task(path) or Path(path).exists():
        return
    what = f"no task {written[1]} is installed, and no file is called {path}"
    raise unknown_task(written[1], what, flag=_FLAG, argument=path.removeprefix(written[1]))


def package_words(path: str) -> str:
    """Return the package that a source's task belongs to, in words."""
    return f"a task of {package_of(path.partition(':')[0])}"


def task_rows(path: str) -> list[Row]:
    """Return the rows of the task and the argument that `path` names.

    Raises:
        OptionsError: the task cannot be used, or a file has this name too.
        DataError: its function raises, or gives something else than rows.
    """
    name, _, argument = path.partition(":")
    task = find_task(name, flag=_FLAG, part="rows")
    if Path(path).exists():
        raise OptionsError(
            code="task.file_of_this_name",
            what=f"{path} is a file, and rows of the installed task {name}",
            where=f"{_FLAG}; {entry_text(name)}",
            why="a name has one meaning",
            do=f"./{path} for the file",
        )
    found = called(name, task.rows, (argument,), code="task.rows")
    wrong = next((index for index, row in enumerate(found) if not isinstance(row, Mapping)), None)
    if wrong is not None:
        what = f"row {wrong + 1} of {task.rows} is {shown(found[wrong])}"
        raise bad_result(name, what, code="task.rows", place=task.rows)
    return [Row(dict(row), path, number) for number, row in enumerate(found, start=1)]
