"""Notices of the library: each is printed once, alone, on the stream of its kind."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from rft_cli.diagnostics.notices import show_notices

LOGGER = logging.getLogger("rft")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The library's logger as it is in a new process, and as it was afterwards."""
    before = (LOGGER.handlers[:], LOGGER.level, LOGGER.propagate)
    LOGGER.handlers[:], LOGGER.propagate = [], True
    LOGGER.setLevel(logging.NOTSET)
    yield
    LOGGER.handlers[:], LOGGER.propagate = before[0], before[2]
    LOGGER.setLevel(before[1])


def test_notices_are_printed_once_however_often_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    show_notices()
    show_notices()
    log = logging.getLogger("rft.somewhere")
    log.debug("a detail")
    log.info("a %s", "notice")
    log.warning("a warning")
    log.info("a download", extra={"aside": True})
    log.error("an error")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("a notice\n", "a warning\na download\nan error\n")
    assert len(LOGGER.handlers) == 1


def test_notices_go_no_further(caplog: pytest.LogCaptureFixture) -> None:
    show_notices()
    LOGGER.warning("a warning")
    assert caplog.records == []


def test_nothing_is_printed_before_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    LOGGER.info("a notice")
    assert capsys.readouterr().out == ""
