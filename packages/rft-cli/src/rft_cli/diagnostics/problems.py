"""Display of a failure: to a person the cause first, then the remedy; to a program one JSON line."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TextIO

from rft_core.errors import Problem, RftError

JSON_FLAGS = ("--json_errors", "--json-errors")
_ROWS = (("where", "where"), ("why", "why"), ("state", "state"), ("do", "do"), ("bundle", "details"))


def wants_json(argv: list[str], environment: Mapping[str, str] = os.environ) -> bool:
    """Return True when problems are shown as JSON: `--json_errors` (removed from `argv`) or RFT_ERRORS=json."""
    asked = any(word in JSON_FLAGS for word in argv)
    argv[:] = [word for word in argv if word not in JSON_FLAGS]
    return asked or environment.get("RFT_ERRORS", "").lower() == "json"


def show(error: RftError, *, as_json: bool = False, stream: TextIO | None = None) -> None:
    """Write the error, every problem of it, to `stream` (stderr)."""
    if as_json:
        print(error.as_json(), file=stream or sys.stderr)
    else:
        _show_to_person(error.problems, error.problem.bundle, stream or sys.stderr)


def show_problem(problem: Problem, exit_code: int, *, as_json: bool = False, stream: TextIO | None = None) -> None:
    """Write one problem to `stream` (stderr)."""
    if as_json:
        print(problem.as_json(exit_code), file=stream or sys.stderr)
    else:
        _show_to_person((problem,), problem.bundle, stream or sys.stderr)


def _show_to_person(problems: tuple[Problem, ...], bundle: str, stream: TextIO) -> None:
    from rich.text import Text

    from rft_cli.diagnostics.console import SafeConsole

    console = SafeConsole(file=stream, highlight=False)
    if len(problems) > 1:
        console.print(Text(f"{len(problems)} settings cannot be used; nothing was started.\n", style="bold"))
    for problem in [problem.shown() for problem in problems]:
        console.print(Text.assemble(("error  ", "bold red"), (problem.what, "bold")), soft_wrap=True)
        for name, label in _ROWS:
            value = bundle if name == "bundle" else getattr(problem, name)
            # several problems share these two, which stand once above and below
            if value and not (len(problems) > 1 and name in ("state", "bundle")):
                style = "bold green" if name == "do" else ""
                console.print(Text.assemble((f"  {label:<8}", "dim"), (value, style)), soft_wrap=True)
        if len(problems) > 1:
            console.print()
    if len(problems) > 1 and bundle:
        console.print(Text.assemble(("  details ", "dim"), bundle), soft_wrap=True)
