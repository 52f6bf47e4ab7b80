"""One process of a run under the health monitor: its phases and steps, and its end when something fails."""

from __future__ import annotations

import os
import shlex
import socket
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rft.process.rank_log import RankLog
from rft.process.stack_dumps import StackDumps
from rft_core.errors import AlarmError, OutageError, RftError, SavedAfterSignal
from rft_core.secrets import scrub_command, scrub_text
from rft_dist.health.monitor import Watch
from rft_dist.launch.process_group import HealthConfig, RankInfo, start_watch, stop_process_group


@dataclass(frozen=True, slots=True)
class MonitoredProcess:
    """Health monitor and log of this rank; a listener of the phase timer."""

    watch: Watch
    log: RankLog
    stacks: StackDumps

    def attach(self, run: Path, resume_command: str) -> None:
        """Direct log and monitor into the directory of the run."""
        self.log.attach(run)
        self.stacks.attach(run)
        self.watch.folder.attach(run, resume_command)

    def enter_phase(self, name: str | None) -> None:
        """Enter a phase: flush the log and record the phase for the monitor."""
        self.log.flush()
        self.stacks.open()
        self.watch.activity.enter_phase(name)

    def end_step(self) -> None:
        """End a step: record it for the monitor and in the log."""
        activity = self.watch.activity
        activity.end_step()
        last = f", last collective #{activity.last.call.number}" if activity.last else ""
        self.log.write(f"{time.strftime('%H:%M:%S')} end of step {activity.step - 1}{last}\n")


def first_line(ranks: RankInfo, device: str, command: Sequence[str]) -> str:
    """Return the first line of a rank's log."""
    who = f"rank {ranks.rank} of {ranks.world_size} (node {ranks.node_rank}, {socket.gethostname()}"
    return f"{who}, pid {os.getpid()}, {device}): {shlex.join(scrub_command(command))}"


@contextmanager
def watched_process(
    ranks: RankInfo, watched: HealthConfig, log: RankLog, show_error: Callable[[RftError], None] | None = None
) -> Generator[MonitoredProcess]:
    """Monitor the ranks while the block runs. An error that ends it is first reported to the other ranks.

    `show_error` shows the error of a process that is ended from outside of its main thread.

    Raises:
        PeerError: another rank is the reason why this one cannot go on; the message is that rank's.
    """
    watch = start_watch(ranks, watched, scrub=scrub_text)
    if show_error is not None:
        watch.folder.show = show_error
    stacks = StackDumps(ranks.rank)
    saved: SavedAfterSignal | OutageError | AlarmError | None = None
    try:
        try:
            yield MonitoredProcess(watch, log, stacks)
        # agreed by all ranks, so the others end in the same way
        except (SavedAfterSignal, OutageError, AlarmError) as error:
            saved = error
        watch.close()
    except BaseException as error:
        # the first failure may be another rank's, of which this error is a consequence
        shown = watch.failed(error) or error
        log.write(_in_full(shown))
        if shown is error:
            raise
        raise shown from error
    finally:
        stacks.close()
        stop_process_group()
    # raised after a proper end: a save on a signal, in an outage or on an alarm is no failure
    if saved is not None:
        log.write(_in_full(saved))
        raise saved


def _in_full(error: BaseException) -> str:
    if isinstance(error, RftError):
        return f"{error}\n"
    return scrub_text("".join(traceback.format_exception(error)))
