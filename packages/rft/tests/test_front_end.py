"""A front end without callables shows nothing and adds nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rft.front_end import SILENT


def test_a_silent_front_end_shows_nothing_and_has_no_sinks(capsys: Any) -> None:
    nothing: Any = None
    SILENT.show_plan(nothing, nothing, nothing)
    SILENT.run_begins(Path("run"))
    assert list(SILENT.make_sinks(nothing, 3)) == []
    assert SILENT.show_error is None
    assert capsys.readouterr() == ("", "")
