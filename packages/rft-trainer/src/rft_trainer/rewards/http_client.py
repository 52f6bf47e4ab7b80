"""JSON requests over HTTP: one deadline for request and answer, retries on network errors alone.

A timeout of a socket bounds one wait for bytes: a server that sends a byte a minute keeps such a client for ever.
Here a timer cuts the connection when the time of the whole request is over.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from rft_core.errors import OptionsError
from rft_trainer.records.scores import RewardStatus

TOKEN = "RFT_REMOTE_TOKEN"
"""Variable of the environment whose value is sent as a bearer token, where it is set."""

_LARGEST = 64 << 20
_FIRST_WAIT = 0.1


class RequestFailure(Exception):
    """Error of a request without a usable answer: `status` for the responses, and what happened."""

    def __init__(self, status: RewardStatus, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a server, with deadline and retries. Example: `Endpoint("http://localhost:9000/score")`."""

    url: str
    seconds: float = 120.0
    """For one request with all its tries."""
    retries: int = 3
    sleep: Callable[[float], None] = field(default=time.sleep, compare=False)

    @property
    def parts(self) -> SplitResult:
        """Components of the URL, parsed."""
        return urlsplit(self.url)

    def post(self, payload: object) -> Any:
        """Send a request and return the answer's JSON value.

        Raises:
            RequestFailure: no answer in time, a network error every time, another code than 200, no JSON.
        """
        body = json.dumps(payload).encode()
        deadline = time.monotonic() + self.seconds
        wait = _FIRST_WAIT
        for left in range(self.retries, -1, -1):
            try:
                return _parsed(self._exchange(body, deadline), self.url)
            # only what a second try may mend; an answer of the server, whatever it says, is final
            except _NetworkError as error:
                # no wait that would end behind the deadline
                if not left or time.monotonic() + wait >= deadline:
                    raise RequestFailure(RewardStatus.FAILED, f"{self.url}: {error}") from error
                self.sleep(wait)
                wait *= 2
        raise AssertionError

    def _exchange(self, body: bytes, deadline: float) -> bytes:
        # at least a millisecond: a timeout of 0 would make the socket non-blocking
        seconds = max(deadline - time.monotonic(), 0.001)
        parts = self.parts
        assert parts.hostname is not None
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        # a new connection for every try: the last one may be half closed
        connection = kind(parts.hostname, parts.port, timeout=seconds)
        timer: threading.Timer | None = None
        try:
            connection.connect()
            # the socket itself: a response that closes the connection takes it away from there
            timer = threading.Timer(deadline - time.monotonic(), _cut, [connection.sock])
            timer.daemon = True
            timer.start()
            content = _answer(connection, parts, body)
            if time.monotonic() >= deadline:  # an answer of no stated length ends where it was cut
                raise TimeoutError
            return content
        except TimeoutError as error:
            raise self._late() from error
        # before OSError, of which it is a kind: no second try makes a certificate valid
        except (ssl.SSLCertVerificationError, UnicodeError, ValueError) as error:
            raise RequestFailure(RewardStatus.FAILED, f"{self.url}: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            # the timer's cut looks like an error of the network: the clock tells the two apart
            if time.monotonic() >= deadline:
                raise self._late() from error
            again = isinstance(error, OSError | http.client.IncompleteRead)
            message = f"{type(error).__name__}: {error}"
            raise (
                _NetworkError(message) if again else RequestFailure(RewardStatus.FAILED, f"{self.url}: {message}")
            ) from (error)
        finally:
            if timer is not None:
                timer.cancel()
            connection.close()

    def _late(self) -> RequestFailure:
        return RequestFailure(RewardStatus.TIMEOUT, f"{self.url}: no answer within {self.seconds:g} s")


def checked_url(url: str, flag: str) -> str:
    """Return the URL if requests can be sent to it.

    Raises:
        OptionsError: another scheme than http and https, no host, or a password in it, which would be written into
            the run's files.
    """
    parts = urlsplit(url)
    if parts.username or parts.password:
        what = f"{flag}: the URL of {parts.hostname} holds a user name or a password"
        why = "settings are written into the run's config.yaml"
        raise _refused(what, flag, why, f"{flag} {parts.scheme}://{parts.hostname}{parts.path}, and {TOKEN}=...")
    if parts.scheme not in ("http", "https") or not parts.hostname or not _has_port(parts):
        why = "requests are sent over HTTP to a named host"
        raise _refused(f"{flag} = {url!r}", flag, why, f"{flag} http://localhost:8000/score")
    return url


def _refused(what: str, flag: str, why: str, do: str) -> OptionsError:
    return OptionsError(code="reward.url", what=what, where=flag, why=why, do=do)


def _has_port(parts: SplitResult) -> bool:
    """Return whether the port is a number, or none is given."""
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False


class _NetworkError(Exception):
    """Network error that is worth a retry."""


def _answer(connection: http.client.HTTPConnection, parts: SplitResult, body: bytes) -> bytes:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    token = os.environ.get(TOKEN)
    if token:
        headers["Authorization"] = f"Bearer {token}"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection.request("POST", path, body, headers)
    response = connection.getresponse()
    # one byte more than allowed, which shows that there is more
    content = response.read(_LARGEST + 1)
    # what the stated length still lacks: a body that was cut off may be valid JSON all the same
    if response.length and len(content) <= _LARGEST:
        raise http.client.IncompleteRead(content, response.length)
    where = f"{parts.scheme}://{parts.netloc}{parts.path}"
    if response.status != http.client.OK:
        said = content[:200].decode(errors="replace").strip()
        raise RequestFailure(RewardStatus.FAILED, f"{where}: HTTP {response.status} {response.reason}: {said}")
    if len(content) > _LARGEST:
        raise RequestFailure(RewardStatus.FAILED, f"{where}: the answer is larger than {_LARGEST >> 20} MiB")
    return content


def _parsed(content: bytes, url: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RequestFailure(RewardStatus.FAILED, f"{url}: the answer is no JSON: {content[:80]!r}") from error


def _cut(sock: socket.socket) -> None:
    """Shut the connection down, which wakes the thread that waits for its bytes."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # of a TLS socket too: its own would first say goodbye
