"""The log of a rank at its limits: what is kept before its folder is there, and handlers beside those of others."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from rft.process import rank_log
from rft.process.rank_log import RankLog, Tee, logged


def test_what_waits_for_a_folder_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rank_log, "_KEPT", 4)
    log = RankLog(0)
    for text in ("ab", "cd", "ef"):
        log.write(text)
    log.attach(tmp_path)
    (tmp_path / "logs").mkdir()
    log.flush()
    log.write("gh\n")
    assert (tmp_path / "logs" / "rank_0.log").read_text() == "abcdgh\n"
    log.close()
    log.close()


def test_a_log_that_cannot_be_written_ends_no_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "logs" / "rank_0.log").mkdir(parents=True)
    log = RankLog(0)
    log.attach(tmp_path)
    log.write("a\n")
    (tmp_path / "logs" / "rank_0.log").rmdir()
    log.write("b\n")
    assert (tmp_path / "logs" / "rank_0.log").read_text() == "a\nb\n"
    assert log._file is not None  # pyright: ignore[reportPrivateUsage]
    log._file.close()  # pyright: ignore[reportPrivateUsage]
    log.write("into a closed file\n")
    log.close()


def test_a_stream_is_what_it_was_and_is_written_to_the_log_after_it() -> None:
    order: list[str] = []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            order.append(f"stream {text}")
            return super().write(text)

    log: Any = type("Log", (), {"write": staticmethod(lambda text: order.append(f"log {text}"))})()
    stream = Stream()
    tee = Tee(stream, log)
    assert tee.write("abc") == 3
    tee.writelines(["x", "y"])
    assert order == ["stream abc", "log abc", "stream x", "log x", "stream y", "log y"]
    assert tee.getvalue() == "abcxy"


@pytest.mark.parametrize("others", [0, 1])
def test_warnings_are_in_the_log_once_whoever_else_handles_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], others: int
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [logging.NullHandler() for _ in range(others)])
    monkeypatch.setattr(logging.getLogger("rft"), "handlers", [])  # a command in this process shows notices by one
    (tmp_path / "logs").mkdir()
    with logged(0, "first line") as log:
        log.attach(tmp_path)
        logging.getLogger("rft").info("quiet")
        logging.getLogger("rft").warning("aloud")
        logging.getLogger("rft").debug("nothing")
        assert len(root.handlers) == 2
    text = (tmp_path / "logs" / "rank_0.log").read_text()
    assert [text.count(word) for word in ("quiet", "aloud", "nothing")] == [1, 1, 0]
    shown = capsys.readouterr().err
    # where there is no handler, warnings reach stderr as they would without the log
    assert ("aloud" in shown, "quiet" in shown) == (others == 0, False)


def test_a_level_that_was_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other = logging.getLogger("rft_dist"), logging.getLogger("rft_engine")
    monkeypatch.setattr(ours, "level", logging.ERROR)
    monkeypatch.setattr(other, "level", logging.NOTSET)
    with logged(0, "first line"):
        assert (ours.level, other.level) == (logging.ERROR, logging.INFO)
    assert (ours.level, other.level) == (logging.ERROR, logging.NOTSET)
    assert not isinstance(sys.stdout, Tee)


@pytest.mark.parametrize("begins_first", [True, False])
def test_a_text_that_is_no_unicode_takes_nothing_else_with_it(tmp_path: Path, begins_first: bool) -> None:
    log = RankLog(0)
    (tmp_path / "logs").mkdir()
    if begins_first:
        log.attach(tmp_path)
    for text in ("before\n", "half \ud83d of it\n", "after\n"):
        log.write(text)
    log.attach(tmp_path)
    log.close()
    assert (tmp_path / "logs" / "rank_0.log").read_text() == "before\nhalf \\ud83d of it\nafter\n"


def test_a_folder_that_appears_after_the_last_text_still_gets_the_log(tmp_path: Path) -> None:
    log = RankLog(3)
    log.attach(tmp_path)
    log.write("a line\nand half of one")
    (tmp_path / "logs").mkdir()
    log.close()
    log.write("too late")
    assert (tmp_path / "logs" / "rank_3.log").read_text() == "a line\nand half of one"


def test_what_is_printed_to_is_still_a_stream(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    out, err = sys.stdout, sys.stderr
    with logged(0, "header") as log:
        log.attach(tmp_path)
        assert sys.stdout.write("to out\n") == len("to out\n")
        assert sys.stderr.write("to err\n") == len("to err\n")
        assert (sys.stdout.isatty(), sys.stdout.encoding) == (out.isatty(), out.encoding)
        sys.stdout.flush()
    assert (sys.stdout, sys.stderr) == (out, err)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("to out\n", "to err\n")
    header, *lines = (tmp_path / "logs" / "rank_0.log").read_text().splitlines()
    assert header.endswith("  header")
    assert lines == ["to out", "to err"]


def test_a_log_on_a_full_disk_ends_no_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_0.log").symlink_to("/dev/full")
    with logged(0, "header") as log:
        log.attach(tmp_path)
        for _ in range(3):
            sys.stdout.write("what the disk refuses\n")
            log.flush()
    assert capsys.readouterr().out == 3 * "what the disk refuses\n"


def test_a_warning_that_quotes_others_steers_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with logged(0, "a rank"):
        logging.getLogger("rft_trainer.evaluation").warning("first: %s", "bad \x1b[2J text")
    assert capsys.readouterr().err == "first: bad \\x1b[2J text\n"
