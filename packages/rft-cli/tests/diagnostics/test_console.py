"""Text of others on a page: no escape sequence of it reaches the terminal, those of the page do."""

from __future__ import annotations

import io
import logging

import pytest
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rft_cli.diagnostics import notices, problems
from rft_cli.diagnostics.console import SafeConsole
from rft_core.errors import Problem

HOSTILE = "a\x1b[2J\x1b]0;owned\x07\x9b31m\rb"
SHOWN = r"a\x1b[2J\x1b]0;owned\x9b31mb"
"""Rich takes a bell and a return out by itself."""


def test_no_escape_of_a_text_is_left_in_any_kind_of_page() -> None:
    table = Table("name")
    table.add_row(HOSTILE)
    for page in (HOSTILE, Text(HOSTILE), Text.assemble((HOSTILE, "bold")), Panel(HOSTILE), table):
        stream = io.StringIO()
        SafeConsole(file=stream, width=200, force_terminal=False).print(page)
        # a cell of a table is as wide as what rich measured, and is cut there
        assert SHOWN[:12] in stream.getvalue()
        assert not {"\x1b", "\x9b", "\r", "\x07"} & set(stream.getvalue())
        assert page is table or SHOWN in stream.getvalue()


def test_colours_and_movements_of_the_page_itself_are_kept() -> None:
    stream = io.StringIO()
    console = SafeConsole(file=stream, width=200, force_terminal=True, color_system="standard")
    console.print(Text(HOSTILE, "bold"))
    assert stream.getvalue().startswith("\x1b[1m")
    assert SHOWN in stream.getvalue()
    stream.truncate(0)
    with Live(Panel(HOSTILE), console=console, auto_refresh=False) as live:
        live.update(Panel("next"), refresh=True)
    assert "\x1b[1A" in stream.getvalue()
    assert "\x1b]0" not in stream.getvalue()


def test_errors_and_notices_show_the_text_of_others_as_marks(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    problems.show_problem(Problem(code="x", what=HOSTILE, where="w", why="w", do=HOSTILE), 4, stream=stream)
    notices.show_notices()
    logging.getLogger("rft.test").info("%s", HOSTILE)
    printed = stream.getvalue() + capsys.readouterr().out
    assert printed.count(r"a\x1b[2J\x1b]0;owned") == 3
    assert not {"\x1b", "\x9b", "\r", "\x07"} & set(printed)
