"""Runs as children of the fork server: start, wait, signal, read what they left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Prelude = tuple[str, list[Any]]
_SERVER = Path(__file__).with_name("fork_server.py")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended: its exit code (negative: the signal that killed it), what it printed, its seconds."""

    code: int
    output: str
    seconds: float


class Child:
    """One run that was started."""

    def __init__(self, server: ForkServer, pid: int, log: Path) -> None:
        self._server, self.pid, self._log = server, pid, log
        self._started = time.monotonic()
        self._ended: Ended | None = None

    def send(self, number: signal.Signals) -> None:
        """Send a signal; one that has ended already is left alone (its number is not reused before `wait`)."""
        if self._ended is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return

    def wait(self) -> Ended:
        """Until it has ended."""
        if self._ended is None:
            code = int(self._server.receive()["status"])
            seconds = time.monotonic() - self._started
            self._ended = Ended(code, self._log.read_text(errors="replace"), seconds)
        return self._ended


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

    def start(
        self,
        *argv: str,
        environment: Mapping[str, str] | None = None,
        preludes: Sequence[Prelude] = (),
        directory: Path | None = None,
    ) -> Child:
        """`rft-train ARGV...` in a child; the next one starts when this one was waited for."""
        self._count += 1
        log = self._folder / f"{self._count:04d}-{argv[0]}.log"
        request = {
            "argv": list(argv),
            "log": str(log),
            "environment": dict(environment or {}),
            "preludes": [list(prelude) for prelude in preludes],
            "directory": str(directory or self._folder),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Child(self, int(self.receive()["pid"]), log)

    def run(
        self,
        *argv: str,
        environment: Mapping[str, str] | None = None,
        preludes: Sequence[Prelude] = (),
        directory: Path | None = None,
    ) -> Ended:
        """Start and wait."""
        return self.start(*argv, environment=environment, preludes=preludes, directory=directory).wait()

    def must_finish(self, *argv: str, preludes: Sequence[Prelude] = ()) -> Ended:
        """Start, wait, and insist on success."""
        ended = self.run(*argv, preludes=preludes)
        assert ended.code == 0, f"rft-train {' '.join(argv)} ended with {ended.code}:\n{ended.output[-4000:]}"
        return ended

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._errors.close()
