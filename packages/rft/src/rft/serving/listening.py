"""Begin and end of a server: the socket it listens on, the token that others must bring, the signals that end it."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from rft.serving.addresses import is_loopback
from rft_core.errors import OptionsError
from rft_dist.preflight.process_checks import free_port, holder_of
from rft_trainer.rewards.servers.http_client import TOKEN


def checked_token(host: str) -> str:
    """Return the token that requests must bring; none is needed where only this machine can ask.

    Raises:
        OptionsError: others can ask, and there is no token.
    """
    token = os.environ.get(TOKEN, "")
    if not token and not is_loopback(host):
        raise OptionsError(
            code="serving.no_token",
            what=f"host = {host}, and {TOKEN} is not set",
            where="--host",
            why="whoever reaches that address could use what is served, and see its answers",
            state="nothing was started",
            do=f"export {TOKEN}={secrets.token_hex(16)}, here and where the requests come from",
        )
    return token


@contextmanager
def listening_socket(host: str, port: int) -> Generator[socket.socket]:
    """Listen on an address while the block runs.

    Raises:
        OptionsError: it cannot be listened on.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # a port at which only connections of a server that ended are closing is taken again
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        why, remedy = _reason_and_remedy(port, error)
        raise OptionsError(
            code="serving.address",
            what=f"cannot listen on {host} port {port}: {error.strerror or error}",
            where="--host, --port",
            why=why,
            state="nothing was started",
            do=remedy,
        ) from error
    with listening:
        yield listening


@contextmanager
def until_stopped() -> Generator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set; the main thread alone can ask for it."""
    event = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        event.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reason_and_remedy(port: int, error: OSError) -> tuple[str, str]:
    """Return why an address cannot be listened on, and what can be."""
    if error.errno == errno.EADDRINUSE:
        return f"the port is held by {holder_of(port)}", f"--port {free_port()}"
    if error.errno == errno.EACCES:
        return "only root may listen on this port", f"--port {free_port()}"
    return "the address is none of this machine", "--host 127.0.0.1"
