"""Runs as children of the fork server: start, wait, signal, read what they left."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Prelude = tuple[str, list[Any]]
LONGEST_RUN = 300.0
_SERVER = Path(__file__).with_name("fork_server.py")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended: its exit code (negative: the signal that killed it), what it printed, its seconds."""

    code: int
    output: str
    seconds: float
    other_codes: tuple[int, ...] = ()
    """Of ranks other than the first."""


class Child:
    """One run that was started."""

    def __init__(
        self,
        server: ForkServer,
        pids: list[int],
        logs: list[Path],
        port: int | None = None,
        longest: float = LONGEST_RUN,
    ) -> None:
        self._server, self.pids, self._logs, self._longest = server, pids, logs, longest
        self.port = port
        """At which the ranks meet; None of a run of one."""
        self._started = time.monotonic()
        self._ended: Ended | None = None

    def send(self, number: signal.Signals, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to its processes, all or those of `ranks`; one that has ended already is left alone."""
        chosen = self.pids if ranks is None else [self.pids[rank] for rank in ranks]
        for pid in chosen if self._ended is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def holds_its_port(self) -> bool:
        """Whether something still listens where its ranks met: a process that outlived them, or their store."""
        if self.port is None:
            return False
        with socket.socket() as listener:
            # connections that were cut stay for a minute, and keep nobody from listening
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", self.port))
            except OSError:
                return True
        return False

    def is_over(self) -> bool:
        """Whether all of its processes have ended."""
        return self._ended is not None or self._server.answers_within(0.0)

    def wait(self) -> Ended:
        """Until it has ended."""
        if self._ended is None:
            codes = self._codes()
            seconds = time.monotonic() - self._started
            output = "".join(log.read_text(errors="replace") for log in self._logs)
            self._ended = Ended(int(codes[0]), output, seconds, tuple(codes[1:]))
        return self._ended

    def _codes(self) -> list[int]:
        """Exit codes; a run that hangs is killed, so that the tests after it find the server ready."""
        if self._server.answers_within(self._longest):
            return self._server.receive()["statuses"]
        self.send(signal.SIGKILL)
        self._server.receive()
        output = "".join(log.read_text(errors="replace")[-3000:] for log in self._logs)
        raise AssertionError(f"the run had not ended after {self._longest:g} s:\n{output}")


class ForkServer:
    """Starts runs, one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(_SERVER.parents[1]), os.environ.get("PYTHONPATH", "")]),
        }
        environment.pop("RFT_FAULT", None)
        self._errors = (folder / "server.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(_SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self.receive()

    def receive(self) -> dict[str, Any]:
        """The server's next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the server ended: {(self._folder / 'server.log').read_text()[-3000:]}"
        return json.loads(line)

    def answers_within(self, seconds: float) -> bool:
        """Whether a line of the server comes."""
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def warm_up(self, model: Path) -> None:
        """Load a model once, so that children find imported what loading imports."""
        self._send({"model": str(model)})
        self.receive()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def start(
        self,
        *argv: str,
        environment: Mapping[str, str] | None = None,
        preludes: Sequence[Prelude] = (),
        num_ranks: int = 1,
        longest: float = LONGEST_RUN,
    ) -> Child:
        """`rft-train ARGV...` in a child, or one a rank; the next one starts when this one was waited for.

        A run that takes longer than `longest` seconds is taken for one that hangs.
        """
        self._count += 1
        logs = [self._folder / f"{self._count:04d}-{argv[0]}-{rank}.log" for rank in range(num_ranks)]
        for log in logs:
            log.touch()  # a child that is killed at once writes none
        variables = _rank_variables(num_ranks)
        port = int(variables[0]["MASTER_PORT"]) if num_ranks > 1 else None
        request = {
            "argv": list(argv),
            "logs": list(map(str, logs)),
            "environments": [_own_test() | dict(environment or {}) | ranks for ranks in variables],
            "preludes": [list(prelude) for prelude in preludes],
            "directory": str(self._folder),
        }
        self._send(request)
        return Child(self, list(self.receive()["pids"]), logs, port, longest)

    def run(
        self,
        *argv: str,
        environment: Mapping[str, str] | None = None,
        preludes: Sequence[Prelude] = (),
        num_ranks: int = 1,
        longest: float = LONGEST_RUN,
    ) -> Ended:
        """Start and wait."""
        return self.start(
            *argv, environment=environment, preludes=preludes, num_ranks=num_ranks, longest=longest
        ).wait()

    def must_finish(
        self, *argv: str, preludes: Sequence[Prelude] = (), num_ranks: int = 1, longest: float = LONGEST_RUN
    ) -> Ended:
        """Start, wait, and insist on success."""
        ended = self.run(*argv, preludes=preludes, num_ranks=num_ranks, longest=longest)
        assert ended.code == 0, f"rft-train {' '.join(argv)} ended with {ended.code}:\n{ended.output[-4000:]}"
        return ended

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()
        self._errors.close()


def _own_test() -> dict[str, str]:
    """The test that asks, as a process of its own would inherit it: the server was begun by another test."""
    return {name: os.environ[name] for name in ("PYTEST_CURRENT_TEST",) if name in os.environ}


def _rank_variables(num_ranks: int) -> list[dict[str, str]]:
    if num_ranks == 1:
        return [{}]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1"}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
