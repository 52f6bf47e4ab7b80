"""One process under the monitor: what its phases and steps record, and how an error and a signal end it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.process import monitored
from rft.process.monitored import MonitoredProcess, first_line, watched_process
from rft_core.errors import OutageError, PeerError, SavedAfterSignal
from rft_core.secrets import scrub_text

PEER = PeerError(code="rank.failed", what="rank 1 is gone", where="h", why="y", do="d")
SAVED = SavedAfterSignal(code="run.saved", what="saved", where="h", why="y", do="d")
SAVED_IN_OUTAGE = OutageError(code="reward.outage", what="saved", where="h", why="y", do="d")


class Log:
    """A log that keeps what is written."""

    def __init__(self, calls: Any) -> None:
        self.written: list[str] = []
        self._made = calls.made

    def attach(self, run: Path) -> None:
        self._made.append(f"log.attach({run})")

    def flush(self) -> None:
        self._made.append("log.flush()")

    def write(self, text: str) -> None:
        self.written.append(text)


def test_phases_and_steps_are_recorded_for_the_monitor_and_in_the_log(calls: Any) -> None:
    log: Any = Log(calls)
    activity = calls.double("activity", last=None, step=5)
    process = MonitoredProcess(calls.double("watch", activity=activity), log, calls.double("stacks"))
    process.attach(Path("run"), "resume")
    process.enter_phase("rollout")
    process.enter_phase(None)
    process.end_step()
    activity.last = SimpleNamespace(call=SimpleNamespace(number=7))
    process.end_step()
    assert calls.taken() == [
        "log.attach(run)",
        f"stacks.attach({Path('run')!r})",
        f"watch.folder.attach({Path('run')!r}, 'resume')",
        "log.flush()",
        "stacks.open()",
        "activity.enter_phase('rollout')",
        "log.flush()",
        "stacks.open()",
        "activity.enter_phase(None)",
        "activity.end_step()",
        "activity.end_step()",
    ]
    assert [line.partition(" ")[2] for line in log.written] == [
        "end of step 4\n",
        "end of step 4, last collective #7\n",
    ]


def test_the_first_line_of_a_log_names_rank_machine_and_command() -> None:
    ranks: Any = SimpleNamespace(rank=1, world_size=4, node_rank=2)
    line = first_line(ranks, "cuda:1", ["rft-train", "rl", "--pretrain", "a b"])
    who = f"rank 1 of 4 (node 2, {socket.gethostname()}, pid {os.getpid()}, cuda:1)"
    assert line == f"{who}: rft-train rl --pretrain 'a b'"


@pytest.fixture
def watch(calls: Any) -> Any:
    """The watch of this process, which knows of no other failure."""
    watch = calls.double("watch", failed=calls.double("failed", returns=None))
    calls.put(monitored, "stop_process_group", start_watch=watch)
    return watch


def block(calls: Any, log: Any, error: BaseException | None = None, show: Any = None) -> None:
    with watched_process(calls.double("ranks"), calls.double("watched"), log, show) as process:
        assert isinstance(process, MonitoredProcess)
        assert process.log is log
        calls.made.append("block")
        if error is not None:
            raise error


def test_a_block_that_ends_well_closes_the_watch_and_then_the_group(calls: Any, watch: Any) -> None:
    log: Any = Log(calls)
    block(calls, log)
    start = f"start_watch(ranks, watched, scrub={scrub_text!r})"
    assert calls.taken() == [start, "block", "watch.close()", "stop_process_group()"]
    assert log.written == []
    shown: Any = object()
    block(calls, log, show=shown)
    assert watch.folder.show is shown


@pytest.mark.parametrize("saved", [SAVED, SAVED_IN_OUTAGE])
def test_a_save_on_a_signal_or_in_an_outage_ends_properly_and_is_raised_at_the_end(
    calls: Any, watch: Any, saved: SavedAfterSignal | OutageError
) -> None:
    log: Any = Log(calls)
    with pytest.raises(type(saved)):
        block(calls, log, saved)
    assert calls.taken()[1:] == ["block", "watch.close()", "stop_process_group()"]
    assert log.written == [f"{saved}\n"]


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt(), PEER])
def test_an_error_is_reported_written_in_full_and_raised(calls: Any, watch: Any, error: BaseException) -> None:
    log: Any = Log(calls)
    with pytest.raises(type(error)):
        block(calls, log, error)
    assert calls.taken()[1:] == ["block", f"failed({error!r})", "stop_process_group()"]
    [text] = log.written
    assert text == f"{PEER}\n" if error is PEER else "Traceback" in text


def test_the_failure_of_another_rank_is_raised_in_the_place_of_its_consequence(calls: Any, watch: Any) -> None:
    log: Any = Log(calls)
    watch.failed.returns = PEER
    error = ValueError("broken")
    with pytest.raises(PeerError) as caught:
        block(calls, log, error)
    assert caught.value is PEER
    assert caught.value.__cause__ is error
    assert log.written == [f"{PEER}\n"]


def test_a_traceback_is_written_without_secrets(calls: Any, watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log: Any = Log(calls)
    monkeypatch.setattr(monitored, "scrub_text", lambda text: text.replace("secret", "***"))
    with pytest.raises(ValueError, match="secret"):
        block(calls, log, ValueError("secret"))
    assert "secret" not in log.written[0].splitlines()[-1]
