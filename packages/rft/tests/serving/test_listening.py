"""The socket of a server: after a kill its port is taken again, and one that another holds is refused by name."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rft.serving.listening import listening_socket
from rft_core.errors import OptionsError

HOST = "127.0.0.1"
SERVER = """
import subprocess, sys, time
from rft.serving.listening import listening_socket
with listening_socket("127.0.0.1", int(sys.argv[1])) as listening:
    left = subprocess.Popen(["sleep", "600"])
    print(listening.getsockname()[1], left.pid, flush=True)
    client = listening.accept()[0]
    print("asked", flush=True)
    time.sleep(600)
"""


@contextmanager
def server(port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """A server, its port, and a process that it has started; both are gone after the block."""
    with subprocess.Popen([sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE, text=True) as process:
        left = 0
        try:
            assert process.stdout is not None
            number, left = map(int, process.stdout.readline().split())
            yield process, number, left
        finally:
            process.kill()
            if left:
                os.kill(left, signal.SIGKILL)


def closing(port: int) -> bool:
    """Whether connections at a port are closing, which nobody accepts any more."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    # 06 is TIME_WAIT, 05 and 04 are FIN_WAIT2 and FIN_WAIT1
    return any(int(row[1].rpartition(":")[2], 16) == port and row[3] in ("04", "05", "06") for row in rows)


def refused(host: str, port: int) -> tuple[str, str, str]:
    """Code, reason and remedy of an address that is refused."""
    with pytest.raises(OptionsError) as caught, listening_socket(host, port):
        pass
    problem = caught.value.problem
    return problem.code, problem.why, problem.do


def test_a_server_that_was_killed_leaves_its_port_to_the_next_one() -> None:
    with server() as (process, port, _):
        assert process.stdout is not None
        with socket.create_connection((HOST, port)) as client:
            assert process.stdout.readline() == "asked\n"
            process.kill()
            process.wait()
            assert client.recv(1) == b""
            # the process that it had started lives on
            assert closing(port), "the killed side's half of the connection has not ended"
            with listening_socket(HOST, port) as again:
                assert again.getsockname()[1] == port
        assert closing(port), "the connection's end is waited for"
        with listening_socket(HOST, port) as again, socket.create_connection((HOST, port)):
            again.accept()[0].close()


def test_a_port_that_another_program_holds_is_refused_with_its_holder_and_a_port_that_is_free() -> None:
    with server() as (process, port, _):
        code, why, remedy = refused(HOST, port)
    assert code == "serving.address"
    assert f"pid {process.pid}" in why
    with listening_socket(HOST, int(remedy.removeprefix("--port "))):
        pass


def test_an_address_of_another_machine_or_none_is_refused_with_one_of_this_machine() -> None:
    for host in ("192.0.2.1", "no-such-machine.invalid"):
        assert refused(host, 0) == ("serving.address", "the address is none of this machine", "--host 127.0.0.1")


def test_a_port_that_needs_root_is_refused_with_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> socket.socket:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched:
        patched.setattr(socket, "create_server", forbidden)
        code, why, remedy = refused(HOST, 80)
    assert (code, why) == ("serving.address", "only root may listen on this port")
    assert int(remedy.removeprefix("--port ")) > 1023
