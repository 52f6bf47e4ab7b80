"""Problems of single options, one function a code: unknown, without a value, with a wrong one, or a stray word."""

from __future__ import annotations

from rft_core.errors import Problem

COMMAND_LINE = "command line"


def unknown_option(written: str, why: str, do: str, where: str = COMMAND_LINE) -> Problem:
    """Return the problem of a name that no option has."""
    return Problem(code="option.unknown", what=f"unknown option {written}", where=where, why=why, do=do)


def needs_value(what: str, why: str, do: str, where: str = COMMAND_LINE) -> Problem:
    """Return the problem of an option that needs a value and has none."""
    return Problem(code="option.no_value", what=what, where=where, why=why, do=do)


def not_a_value(what: str, why: str, do: str, where: str = COMMAND_LINE) -> Problem:
    """Return the problem of a value of the wrong kind, or of one that the option does not take."""
    return Problem(code="option.value", what=what, where=where, why=why, do=do)


def stray_word(what: str, why: str, do: str) -> Problem:
    """Return the problem of a word that no option and no command takes."""
    return Problem(code="option.stray", what=what, where=COMMAND_LINE, why=why, do=do)
