"""Tasks by their names, found by the entry points of installed packages.

A package that cannot be used is listed with the reason, and fails only what names its task.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from rft_core.errors import DataError, OptionsError
from rft_core.nearest_names import nearest_names
from rft_trainer.installed_tasks.record import InstalledTask

GROUP = "rft.tasks"
"""Group of entry points that name records of tasks."""


def task_names() -> list[str]:
    """Return the names of all installed tasks, of those that cannot be used too; none of them is imported."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def package_of(name: str) -> str:
    """Return name and version of the package of an installed task; the first where several have a task of this name."""
    return _package(_entries(name)[0])


def find_task(name: str, *, flag: str, part: str) -> InstalledTask:
    """Return the installed task of this name, which has the part that `flag` asks for.

    Raises:
        OptionsError: no package or two have a task of this name, its record cannot be imported or is none, or it has
            no such part.
    """
    entries = _entries(name)
    if not entries:
        raise unknown_task(name, f"no task {name} is installed", flag=flag)
    if len(entries) > 1:
        raise _clash(entries, f"{len(entries)} packages have a task {name}", flag)
    [entry] = entries
    task, fault = _loaded(entry)
    if task is None:
        raise _refusal(
            "task.unusable", f"the task {name} cannot be used: {fault}", flag, entry, "its record could not be read"
        )
    if part not in task.parts:
        has = " and ".join(task.parts) or "nothing"
        raise _refusal(
            "task.no_part", f"the task {name} has no {part}; it has {has}", flag, entry, f"{flag} takes its {part}"
        )
    return task


def unknown_task(name: str, what: str, *, flag: str, argument: str = "") -> OptionsError:
    """Return the error of a name that no installed task has."""
    names = task_names()
    near = nearest_names(name, names, count=1)
    return OptionsError(
        code="task.unknown",
        what=what,
        where=flag,
        why=f"installed tasks: {', '.join(names) or 'none'}",
        do=f"{near[0]}{argument} in its place" if near else f"install the package of {name}",
    )


def called(name: str, reference: str, arguments: tuple[object, ...], *, code: str, as_items: bool = False) -> list[Any]:
    """Call a function of an installed task and return what it gives as a list, which is not empty.

    `as_items`: it gives a mapping, whose (key, value) pairs are returned.

    Raises:
        DataError: it cannot be imported, raises, or gives nothing.
    """
    shown = f"{reference}({', '.join(repr(value) for value in arguments if isinstance(value, str))})"
    try:
        given: Any = function(reference)(*arguments)
        found = list(dict(given).items()) if as_items else list(given)
    except Exception as error:  # whatever the code of another package raises
        frame = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{shown} raised {type(error).__name__}: {error}"
        raise bad_result(name, what, code=code, place=f"{frame.filename}:{frame.lineno}") from error
    if not found:
        raise bad_result(name, f"{shown} gave nothing", code=code, place=reference)
    return found


def bad_result(name: str, what: str, *, code: str, place: str) -> DataError:
    """Return the error of what a function of an installed task gave or raised."""
    return DataError(
        code=code,
        what=what,
        where=entry_text(name),
        why="rows are mappings from columns to values, a constraint sequences of token ids, an evaluation numbers by "
        "name; of each at least one",
        do=f"correct {place}, or name another argument behind the colon",
    )


def refuse_built_in(name: str, built_in: Collection[str], *, flag: str) -> None:
    """Refuse a name that means something of this program and a task of a package.

    Raises:
        OptionsError: both are there.
    """
    if name in built_in and _entries(name):
        raise _clash(_entries(name), f"{name} is built in, and the name of an installed task too", flag)


def function(reference: str) -> Callable[..., Any]:
    """Import what a text "module:function" names; raises whatever its module raises."""
    module, _, attribute = reference.partition(":")
    found: Any = import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def entry_text(name: str) -> str:
    """Return the entry point of an installed task with its package, for messages."""
    return _entry_text(_entries(name)[0])


def listed_tasks() -> list[tuple[str, str]]:
    """(name, its parts and its package, or why it cannot be used) of every entry point; each is imported."""
    rows: list[tuple[str, str]] = []
    entries = sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, _package(entry)))
    for entry in entries:
        twice = [other for other in entries if other.name == entry.name and other is not entry]
        task, fault = _loaded(entry)
        fault = f"{_package(twice[0])} has a task of this name too" if twice else fault
        about = f"cannot be used: {fault}" if fault or task is None else ", ".join(task.parts) or "nothing"
        rows.append((entry.name, f"{about} ({_package(entry)})"))
    return rows


def _entries(name: str) -> list[EntryPoint]:
    return sorted(entry_points(group=GROUP, name=name), key=_package)


def _loaded(entry: EntryPoint) -> tuple[InstalledTask | None, str]:
    """Return the record of an entry point, or why there is none."""
    try:
        record = entry.load()
    except Exception as error:  # noqa: BLE001 - whatever a module of another package raises while it is imported
        return None, f"{type(error).__name__}: {error}"
    if type(record) is not InstalledTask:
        return (
            None,
            f"{entry.value} is of type {type(record).__name__}, and no {InstalledTask.__module__}.InstalledTask",
        )
    if record.name != entry.name:
        return None, f"{entry.value} is the record of a task {record.name}"
    return record, ""


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value


def _entry_text(entry: EntryPoint) -> str:
    return f"entry point {entry.name} = {entry.value} of {_package(entry)}"


def _clash(entries: list[EntryPoint], what: str, flag: str) -> OptionsError:
    return OptionsError(
        code="task.name_clash",
        what=what,
        where=f"{flag}; {'; '.join(map(_entry_text, entries))}",
        why="a name has one meaning",
        do=f"pip uninstall {entries[-1].dist.name if entries[-1].dist else entries[-1].value}",
    )


def _refusal(code: str, what: str, flag: str, entry: EntryPoint, why: str) -> OptionsError:
    return OptionsError(
        code=code,
        what=what,
        where=f"{flag}; {_entry_text(entry)}",
        why=why,
        do=f"mend {entry.value}, or pip uninstall {entry.dist.name if entry.dist else entry.value}",
    )
