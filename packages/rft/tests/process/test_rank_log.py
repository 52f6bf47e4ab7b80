"""The log of a rank holds what it prints and logs, whenever its folder comes to be."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from rft.process.rank_log import RankLog, logged


def read(run: Path, rank: int = 1) -> str:
    return (run / "logs" / f"rank_{rank}.log").read_text()


def test_what_is_printed_and_logged_is_in_the_log_and_still_on_the_streams(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sys.stdout, sys.stderr
    with logged(1, "rank 1 of 2") as log:
        print("before the folder is known")
        log.attach(tmp_path)
        print("to stderr", file=sys.stderr)
        assert not (tmp_path / "logs").exists()
        (tmp_path / "logs").mkdir()
        logging.getLogger("rft_dist.launch.rendezvous").info("told quietly")
        logging.getLogger("rft_dist.launch.rendezvous").debug("told to nobody")
        logging.getLogger("another").info("of a library")
        logging.getLogger("rft_dist.launch.rendezvous").warning("told aloud")
        assert "told quietly" in read(tmp_path), "the file is written while the run goes on"
        log.write("straight into the log\n")
    assert (sys.stdout, sys.stderr) == before
    text = read(tmp_path)
    assert text.splitlines()[0].endswith("  rank 1 of 2")
    for line in ("before the folder is known", "to stderr", "straight into the log"):
        assert text.count(line) == 1, line
    assert "INFO rft_dist.launch.rendezvous: told quietly" in text
    assert text.count("told aloud") == 1
    assert "told to nobody" not in text
    assert "of a library" not in text
    streams = capsys.readouterr()
    assert streams.out == "before the folder is known\n"
    assert "told quietly" not in streams.err
    assert "to stderr" in streams.err


def test_levels_and_handlers_are_put_back() -> None:
    root, ours = logging.getLogger(), logging.getLogger("rft_dist")
    before = list(root.handlers), ours.level
    with pytest.raises(ZeroDivisionError), logged(0, "rank 0"):
        _ = 1 // 0
    assert (list(root.handlers), ours.level) == before


def test_colours_and_what_a_live_panel_draws_over_itself_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = RankLog(1)
    log.attach(tmp_path)
    log.write("\x1b[1;31merror\x1b[0m  cause\n")
    log.write("\x1b[2K\x1b[1Athe panel again\n")
    log.close()
    assert read(tmp_path) == "error  cause\n"


def test_a_run_that_never_began_leaves_no_log(tmp_path: Path) -> None:
    with logged(1, "rank 1 of 2") as log:
        print("refused")
        log.attach(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    log.write("after its end\n")
    (tmp_path / "run" / "logs").mkdir(parents=True)
    log.write("after its end\n")
    assert list((tmp_path / "run" / "logs").iterdir()) == []
