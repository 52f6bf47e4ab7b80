"""`--nproc N`: N ranks of one command on this machine, their output by rank, and one end for all.

The port is chosen by the system and held, so that nothing else gets it. Rank 0 writes to the terminal, the
others to files. A signal goes to all. When one fails, the others get a few seconds to say what they saw and
are ended; the exit code is that of the one that failed of itself. No torch is imported here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rft_core.errors import ExitCode
from rft_dist.launch.environment import LATER_PORTS, SPAWNED

GRACE_SECONDS = 5.0
"""From the first failure to SIGTERM for the others, and from there to SIGKILL twice that."""
_POLL_SECONDS = 0.05
_SHOWN_LINES = 20
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Ended:
    """Exit status of all spawned ranks."""

    code: int
    """0 where all succeeded, else the exit code of `rank`."""
    rank: int | None
    """The rank that failed first; of several, one that does not merely miss another."""
    codes: tuple[int, ...]
    """Of every rank; negative: the signal that ended it."""
    logs: tuple[Path, ...]
    """Where ranks from 1 on wrote."""
    asked: bool = False
    """Whether this process was sent a signal meanwhile, which it has passed on."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Machines that start the ranks of one run together, each as many."""

    num_nodes: int
    node_rank: int
    """Number of this machine, from 0."""
    master_addr: str
    """Host of machine 0, at which its first rank listens."""
    master_port: int


def spawn_ranks(
    command: Sequence[str],
    nproc: int,
    *,
    log_folder: Path,
    environment: Mapping[str, str] | None = None,
    nodes: Nodes | None = None,
    meetings: int = 1,
) -> Ended:
    """Run `command` as `nproc` ranks of this machine, and wait for them; without `nodes` they meet at a free port.

    `meetings` is how often the ranks of one machine meet, each time at another port (`take_next_port`).
    """
    values = dict(os.environ if environment is None else environment)
    log_folder.mkdir(parents=True, exist_ok=True)
    first = nodes.node_rank * nproc if nodes else 0
    logs = tuple(log_folder / f"output_rank_{first + local}.log" for local in range(1, nproc))
    with contextlib.ExitStack() as stack:
        port = nodes.master_port if nodes else stack.enter_context(_held_port())
        later = [stack.enter_context(_held_port()) for _ in range(meetings - 1)]
        if later:
            values[LATER_PORTS] = ",".join(map(str, later))
        processes = [
            stack.enter_context(_started(command, values | rank_variables(local, nproc, port, nodes), log))
            for local, log in enumerate((None, *logs))
        ]
        with _forwarding(processes) as received:
            failed = _wait(processes)
    codes = tuple(process.returncode for process in processes)
    return Ended(0 if failed is None else _as_exit_code(codes[failed]), failed, codes, logs, bool(received))


def spawn_process(command: Sequence[str], environment: Mapping[str, str]) -> Ended:
    """Run `command` as one process that is no rank, with this one's output, and wait for it."""
    with _started(command, environment, None) as process, _forwarding([process]) as received:
        process.wait()
    code = process.returncode
    return Ended(_as_exit_code(code), 0 if code else None, (code,), (), bool(received))


def rank_variables(rank: int, nproc: int, port: int, nodes: Nodes | None = None) -> dict[str, str]:
    """Return the environment variables of a rank, by its number on its machine."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, SPAWNED: nproc}
    if nodes is not None:
        numbers |= {"RANK": nodes.node_rank * nproc + rank, "WORLD_SIZE": nodes.num_nodes * nproc}
        numbers |= {"NODE_RANK": nodes.node_rank}
    return {name: str(value) for name, value in numbers.items()} | {
        "MASTER_ADDR": nodes.master_addr if nodes else "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def last_lines(log: Path) -> str:
    """The end of what a rank wrote, for a person."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return "\n".join(lines[-_SHOWN_LINES:])


@contextlib.contextmanager
def _held_port() -> Generator[int]:
    """A port that the system gives to nobody else while the block runs; a rank may listen at it.

    Linux lets a second socket listen at a port that is bound with SO_REUSEADDR and does not listen.
    """
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if holder.family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.bind(("", 0))
        yield int(holder.getsockname()[1])


@contextlib.contextmanager
def _started(command: Sequence[str], environment: Mapping[str, str], log: Path | None) -> Generator[subprocess.Popen]:
    """One rank; it is killed should the block end before it does."""
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("ab")) if log else None
        process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches it once, from here
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def _end_with_parent() -> None:
    """Have the child process receive SIGTERM, which saves, when the parent is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def _forwarding(processes: Sequence[subprocess.Popen]) -> Generator[list[int]]:
    """Forward the signals that this process receives to every rank while the block runs; gives those received."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


_SAVED = (ExitCode.SAVED_AFTER_SIGNAL, ExitCode.OUTAGE, ExitCode.ALARM)
"""Exit codes of an end on which all ranks have agreed, after a save."""


def _wait(processes: Sequence[subprocess.Popen]) -> int | None:
    """Wait until all ranks have ended; return the one that failed by itself, if one did."""
    order: list[int] = []
    failed_at: float | None = None
    asked: int | None = None  # ranks that had ended when the others were asked to
    while True:
        for rank, process in enumerate(processes):
            if rank not in order and process.poll() is not None:
                order.append(rank)
        # a rank that has saved is no failure: the others are saving too and need their time
        failures = [rank for rank in order if processes[rank].returncode not in (0, *_SAVED)]
        if len(order) == len(processes):
            # what ended only because it was asked to is not the culprit
            return _culprit(processes, order[:asked])
        if failures:
            now = time.monotonic()
            failed_at = failed_at if failed_at is not None else now
            # not at once: the others may still name the rank that they miss
            if now - failed_at > GRACE_SECONDS and asked is None:
                asked = len(order)
                _send(processes, signal.SIGTERM)
            if now - failed_at > 3 * GRACE_SECONDS:
                _send(processes, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _send(processes: Sequence[subprocess.Popen], number: signal.Signals) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def _culprit(processes: Sequence[subprocess.Popen], order: Sequence[int]) -> int | None:
    """The first to end with an error of its own; else the first that missed another, or that was asked to end."""
    codes = {rank: processes[rank].returncode for rank in order}
    weaker = (0, ExitCode.PEER, *_SAVED)
    own = [rank for rank in order if codes[rank] not in weaker]
    peers = [rank for rank in order if codes[rank] == ExitCode.PEER]
    saved = [rank for rank in order if codes[rank] in _SAVED]
    return next(iter([*own, *peers, *saved]), None)


def _as_exit_code(code: int) -> int:
    """Return the exit code as a shell does: 128 + the number of the signal."""
    return code if code >= 0 else 128 - code
