"""Health monitor of one process: publish heartbeats, diagnose failures, end the process where it must end.

Two threads. The courier (`HeartbeatClient`) calls the store and may block there; the guard makes no blocking call,
so that it can always end the process, also while the main thread is inside a collective that never returns.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from rft_core.errors import ExitCode, PeerError
from rft_dist.health import diagnosis
from rft_dist.health import failure as causes
from rft_dist.health.activity import Activity
from rft_dist.health.error_files import RunFolder
from rft_dist.health.failure import Cause
from rft_dist.health.flight_recorder import abort_groups, library_calls
from rft_dist.health.heartbeat import FINISHED, STOPPING, LastSeen, Status, no_heartbeat_yet
from rft_dist.health.heartbeat_store import HeartbeatClient
from rft_dist.health.process_state import ALIVE, process_state, this_machine
from rft_dist.health.report import page
from rft_dist.health.termination import StoppedByPeer, comes_from_peers, flush, raise_in_main
from rft_dist.settings import WatchSettings

_LOG = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
_TICK_SECONDS = 0.25
_PAUSE_SECONDS = 3.0
_GRACE_SECONDS = 2.0
_START_SECONDS = 5.0
_STORE_SECONDS = 1.0
_LINGER_SECONDS = 20.0
_REPORT_AFTER = (8.0, 60.0, 300.0, 1800.0)
_LOUD_FROM = 60.0


class Watch:
    """Watches this process and its peers from `start` until `close` or `failed`; a single process watches itself.

    `scrub` takes secrets out of texts that are stored.
    """

    def __init__(
        self,
        activity: Activity,
        settings: WatchSettings,
        *,
        rank: int,
        world_size: int,
        store: Store | None,
        serves_store: bool,
        scrub: Callable[[str], str] = str,
        beat: float = BEAT_SECONDS,
    ) -> None:
        self.activity = activity
        self.folder = RunFolder()
        self.cause: Cause | None = None
        self._rank, self._world_size, self._serves_store = rank, world_size, serves_store
        self._scrub, self._beat = scrub, beat
        self._limits = diagnosis.HealthLimits(
            silence=settings.heartbeat_seconds,
            phase=settings.watchdog_seconds,
            first=settings.watchdog_first_seconds,
            collective=settings.watchdog_collective_seconds,
        )
        self._host, self._machine, self._pid = socket.gethostname(), this_machine(), os.getpid()
        self._num_beats, self._ended, self._ended_at = 0, "", 0.0
        self._library = (0, time.monotonic())
        self._courier = HeartbeatClient(store, self, rank=rank, world_size=world_size, beat=beat) if store else None
        self._guard = threading.Thread(target=self._run, name="rft-watch-guard", daemon=True)
        self._stop = threading.Event()
        self._leaving = threading.Event()
        """The main thread is on its way out and ends the process itself."""
        self._deciding = threading.Lock()
        self._neighbours: dict[int, tuple[str, float]] = {}
        self._num_reported, self._has_reported = 0, False
        self._compares_calls = settings.fingerprint_steps > 0

    def start(self) -> None:
        """Begin; returns when all ranks have sent a heartbeat, or after some seconds without."""
        now = time.monotonic()
        if self._courier is not None:
            for rank in range(self._world_size):
                # a rank that never sends a heartbeat then falls silent as any other does
                self._courier.seen[rank] = LastSeen(no_heartbeat_yet(rank), now)
            self._courier.start()
            until = now + _START_SECONDS
            self._courier.announce_now(_START_SECONDS)
            while not self._courier.has_all_heartbeats and time.monotonic() < until:
                self._courier.read_everyone(_STORE_SECONDS)
                time.sleep(0.005)
        self._guard.start()

    # what the main thread calls

    def close(self) -> None:
        """Leave in order. The rank that serves the store waits until the others have left too, or are gone."""
        # announced before the wait: what the others miss afterwards is an end in order
        self._ended, self._ended_at = FINISHED, time.monotonic()
        if self._courier is not None and self._courier.announce_now(_STORE_SECONDS) and self._serves_store:
            until = time.monotonic() + _LINGER_SECONDS
            while time.monotonic() < until and self.cause is None and not self._all_ended():
                time.sleep(0.05)
                self._courier.read_everyone(_STORE_SECONDS)
        self._end_threads()

    def failed(self, error: BaseException) -> PeerError | None:
        """Report `error`, with which the main thread ends; return the error to raise instead where a peer caused it."""
        with self._deciding:
            self._leaving.set()
        try:
            return self._failed(error)
        except StoppedByPeer:  # was under way when the error came; it comes once
            return self._failed(error)

    def _failed(self, error: BaseException) -> PeerError | None:
        own = self._is_own(error)
        # another rank is at fault: wait as long as it takes to notice one that has fallen silent
        cause = None if own else self._wait_for_cause(self._limits.silence + 2 * self._beat)
        if cause is None:
            cause = self._record(error)
            published = self._courier.publish(cause, _STORE_SECONDS) if self._courier else cause
            cause = cause if own else published
        self.cause, self._ended = cause, STOPPING
        is_mine = cause.told_by == self._rank and bool(cause.error)
        if is_mine:
            self.folder.write_error(cause)
        else:
            self._tell(cause)
        abort_groups(self.folder.path, self._rank)
        self._linger()
        self._end_threads()
        return None if is_mine else cause.as_error(own=self._own_words(), do=self.folder.resume_command)

    def _record(self, error: BaseException) -> Cause:
        return causes.failure(
            error,
            rank=self._rank,
            host=self._host,
            pid=self._pid,
            step=self.activity.step,
            phase=self.activity.phase[0],
            scrub=self._scrub,
        )

    # what the courier calls

    def status(self) -> Status:
        """Return this rank's current status."""
        now, activity = time.monotonic(), self.activity
        calls = library_calls()
        # collectives of libraries count as progress, though they change no phase and no call
        if calls != self._library[0]:
            self._library = (calls, now)
        last, (phase, since) = activity.last, activity.phase
        self._num_beats += 1
        return Status(
            rank=self._rank,
            host=self._host,
            machine=self._machine,
            pid=self._pid,
            beat=self._num_beats,
            phase=phase,
            phase_seconds=round(now - since, 3),
            step=activity.step,
            steps_done=activity.steps_done,
            call=last.call if last else None,
            inside=bool(last and last.inside),
            call_seconds=round(now - last.since, 3) if last else 0.0,
            idle_seconds=round(now - max(activity.moved, self._library[1]), 3),
            library_calls=calls,
            stack=tuple(activity.stack()),
            ended=self._ended,
        )

    # the guard

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(_TICK_SECONDS):
            now = time.monotonic()
            if now - last > _PAUSE_SECONDS:
                self._forgive(now)  # this very process was stopped for a while: what it knows of others is old
            last = now
            cause = self._decide(now)
            if cause is not None:
                self._end(cause)
                return

    def _decide(self, now: float) -> Cause | None:
        courier = self._courier
        if courier is None:
            own = {0: LastSeen(self.status(), now)}
            return None if self._ended else diagnosis.of_all(own, self._limits, now)
        # a published cause goes before what this rank sees, so that all ranks report the same
        if courier.cause is not None:
            return courier.cause
        # the system knows the processes of this machine: sooner and surer than any heartbeat
        cause = self._neighbour_cause(now)
        first = courier.seen[0].status
        # once rank 0 has left in order, a store that is gone is no failure
        if cause is None and not first.ended:
            cause = self._store_cause(now)
        return cause or self._cause_of_all(now)

    def _cause_of_all(self, now: float) -> Cause | None:
        """Diagnose all ranks on rank 0; on the others rank 0 and this one, or all ranks once rank 0 has left."""
        assert self._courier is not None
        seen = dict(self._courier.seen)
        if self._rank != 0 and not seen[0].status.ended:
            seen = {0: seen[0]}
        seen[self._rank] = LastSeen(self.status(), self._ended_at or now)
        if self._rank == 0:
            self._report_waiting(seen, now)
        # Neighbours are judged by their processes: one that computes may be silent, for want of Python's lock.
        states = {rank: state for rank, (state, _) in self._neighbours.items()}
        return diagnosis.of_all(
            seen,
            self._limits,
            now,
            world_size=self._world_size,
            neighbours=states,
            compares_calls=self._compares_calls,
        )

    def _neighbour_cause(self, now: float) -> Cause | None:
        assert self._courier is not None
        courier, seen = self._courier, dict(self._courier.seen)
        for rank, each in seen.items():
            if rank == self._rank or each.status.machine != self._machine:
                continue
            state = process_state(each.status.pid)
            # the time of the first look stays, because patience counts from there
            if self._neighbours.get(rank, ("",))[0] != state:
                self._neighbours[rank] = (state, now)
        courier.reads_all = any(state != ALIVE for state, _ in self._neighbours.values())
        unanswered = bool(courier.lost) or now - courier.answered > 2 * self._beat + _STORE_SECONDS
        # Its last heartbeat is read first: it may have left in order.
        known = {r: s for r, s in self._neighbours.items() if unanswered or courier.read_at.get(r, 0.0) > s[1]}
        return diagnosis.of_neighbours(known, seen, now)

    def _store_cause(self, now: float) -> Cause | None:
        """Return the cause where the store does not answer or is lost; a process on this machine is examined first."""
        courier = self._courier
        assert courier is not None
        if self._serves_store or self._neighbours.get(0, ("", now))[0] not in ("", ALIVE):
            return None
        silence = now - courier.answered
        if not courier.lost and silence <= (self._limits.silence or silence):
            return None
        if courier.lost and silence < self._beat + 1.0:
            return None  # it may have left in order, and this rank may be about to
        first = courier.seen[0].status
        what = f"{first.who}, or what serves the store beside it, has not answered for {silence:.0f} s"
        why = f"the connection ended ({courier.lost})" if courier.lost else "its process or its machine is cut off"
        return Cause(causes.STORE, 0, what, why, "; ".join(first.stack[:5]), self._rank)

    def _forgive(self, now: float) -> None:
        self._neighbours.clear()
        if self._courier is not None:
            self._courier.answered = now
            for rank, each in list(self._courier.seen.items()):
                self._courier.seen[rank] = LastSeen(each.status, now)

    def _report_waiting(self, seen: dict[int, LastSeen], now: float) -> None:
        """Log the rank that others wait for, at growing intervals; a new wait starts again."""
        if not diagnosis.waiting_for(seen, now, _REPORT_AFTER[0]):
            self._num_reported = 0
            return
        while self._num_reported < len(_REPORT_AFTER):
            line = diagnosis.waiting_for(seen, now, _REPORT_AFTER[self._num_reported])
            if not line:
                return
            loud = _REPORT_AFTER[self._num_reported] >= _LOUD_FROM
            self._num_reported += 1
            _LOG.log(logging.WARNING if loud else logging.INFO, line)

    # the end

    def _end(self, cause: Cause) -> None:
        """Report the cause, then end this process: by an exception where Python still runs, else at once."""
        if self._courier is not None:
            # where another rank was first, its cause comes back and is the one to report
            cause = self._courier.publish(cause, _STORE_SECONDS)
        self.cause = cause
        with self._deciding:
            if self._leaving.is_set():
                return
            # inside a collective the main thread runs no Python, and the exception would not reach it
            raised = not self._inside_collective()
            if raised:
                raise_in_main(StoppedByPeer)
        # the exception arrived: the main thread ends the process, and cleans up on its way
        if raised and self._leaving.wait(_GRACE_SECONDS):
            return
        self._ended = STOPPING
        self._tell(cause)
        error = cause.as_error(own=self._own_words(), do=self.folder.resume_command)
        self.folder.last_words(error)
        self._linger()
        abort_groups(self.folder.path, self._rank)
        # os._exit flushes nothing
        flush()
        # not sys.exit: this is not the main thread, which may be inside a collective that never returns
        os._exit(int(ExitCode.PEER))

    def _tell(self, cause: Cause) -> None:
        """Write the report page to this rank's stderr and the run's folder, once."""
        with self._deciding:
            # the main thread and the guard may both come here
            if self._has_reported:
                return
            self._has_reported = True
        seen: dict[int, LastSeen] = {0: LastSeen(self.status(), time.monotonic())}
        if self._courier is not None:
            self._courier.read_everyone(_STORE_SECONDS)
            seen = dict(self._courier.seen)
            seen[self._rank] = LastSeen(self.status(), time.monotonic())
        text = page(cause, seen, time.monotonic())
        self.folder.write_page(text)
        self.folder.write_error(cause)
        _LOG.warning("%s", text.rstrip("\n"))

    def _linger(self) -> None:
        """Wait, on the rank that serves the store, until the others know the cause, or for the grace period."""
        if self._courier is None:
            return
        self._courier.acknowledge(_STORE_SECONDS)
        until = time.monotonic() + _GRACE_SECONDS + self._beat
        while self._serves_store and time.monotonic() < until:
            # ranks that are gone acknowledge nothing: waiting for them would use up the whole time
            gone = sum(state != ALIVE for state, _ in self._neighbours.values())
            if self._courier.num_acknowledged(_STORE_SECONDS) >= self._world_size - gone:
                return
            time.sleep(0.05)

    def _end_threads(self) -> None:
        self._stop.set()
        if self._courier is not None:
            self._courier.announce_now(_STORE_SECONDS)
            self._courier.stop()
        if self._guard is not threading.current_thread():
            self._guard.join(timeout=1.0)

    def _wait_for_cause(self, seconds: float) -> Cause | None:
        """Wait at most `seconds` for the cause of a broken collective, which another rank may publish."""
        until = time.monotonic() + seconds
        while self.cause is None and time.monotonic() < until and self._guard.is_alive():
            time.sleep(0.05)
        return self.cause

    def _all_ended(self) -> bool:
        assert self._courier is not None
        dead = {rank for rank, (state, _) in self._neighbours.items() if state != ALIVE}
        return all(s.status.ended or rank in dead or rank == self._rank for rank, s in self._courier.seen.items())

    def _inside_collective(self) -> bool:
        last = self.activity.last
        return bool(last and last.inside)

    def _is_own(self, error: BaseException) -> bool:
        """Return whether an error began on this rank; a broken collective has its reason on another one."""
        if self._world_size == 1:
            return not isinstance(error, StoppedByPeer)
        return not (isinstance(error, StoppedByPeer) or comes_from_peers(error))

    def _own_words(self) -> str:
        last, (phase, since) = self.activity.last, self.activity.phase
        what = f"in phase {phase} of step {self.activity.step} for {time.monotonic() - since:.0f} s"
        inside = f", in collective {last.call.describe()}" if last and last.inside else ""
        return f"rank {self._rank} ({self._host}, pid {self._pid}) was {what}{inside}"
