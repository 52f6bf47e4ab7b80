from __future__ import annotations

from pathlib import Path

from rft_trainer.workers.output_log import OutputLog


def test_output_is_appended_and_an_earlier_log_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "reward-0.log"
    OutputLog(path).write(b"one\n")
    OutputLog(path).write(b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_full_log_makes_way_for_a_new_one_and_the_last_one_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "reward-0.log"
    log = OutputLog(path, max_bytes=10)
    for piece in (b"aaaaaa", b"bbbb", b"cccccc", b"dddddd", b"0123456789abcdef"):
        log.write(piece)
    assert path.read_bytes() == b"6789abcdef"
    assert path.with_name("reward-0.log.1").read_bytes() == b"dddddd"
    assert len(list(tmp_path.iterdir())) == 2


def test_what_cannot_be_written_is_dropped(tmp_path: Path) -> None:
    OutputLog(tmp_path / "absent" / "reward-0.log").write(b"one")
    assert list(tmp_path.iterdir()) == []
