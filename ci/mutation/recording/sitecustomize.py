"""Begins to note the lines that a process reaches, in every Python process of the recorded run; Python imports this."""

import os
import threading
from collections.abc import Callable
from typing import NoReturn

TEST = "PYTEST_CURRENT_TEST"


def _belongs_to_its_test() -> None:
    """Lines of a rank, an engine or a worker are those of the test that started it."""
    current = coverage.Coverage.current()
    if current is not None and TEST in os.environ:
        current.switch_context(os.environ[TEST])


def _in_fork() -> None:
    """A forked child belongs to the test whose environment it is given, which may be another than its parent's."""
    update = os.environ.update

    def update_and_look(*values: object, **named: str) -> None:
        update(*values, **named)
        _belongs_to_its_test()

    os.environ.update = update_and_look  # type: ignore[method-assign]
    _belongs_to_its_test()


def _saved_before(end: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
    """Ranks and forked children end without the work that the interpreter does at its exit."""

    def save_and_end(code: int) -> NoReturn:
        current = coverage.Coverage.current()
        # a thread that ends the process does so because the main one hangs, perhaps with a lock of this
        if current is not None and threading.current_thread() is threading.main_thread():
            current.stop()
            current.save()
        end(code)

    return save_and_end


if "COVERAGE_PROCESS_START" in os.environ:
    import coverage

    coverage.process_startup()
    os._exit = _saved_before(os._exit)
    _belongs_to_its_test()
    os.register_at_fork(after_in_child=_in_fork)  # after that of coverage, which begins anew there
