"""JSON requests over HTTP: one deadline for request and answer, and a wait for a server that is away.

A timeout of a socket bounds one wait for bytes: a server that sends a byte a minute keeps such a client for ever.
Here a timer cuts the connection when the time of the whole request is over.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urljoin, urlsplit

from rft_core.errors import OptionsError
from rft_core.secrets import holds_secret, scrub_text
from rft_core.terminal_text import visible
from rft_trainer.records.scores import RewardStatus
from rft_trainer.rewards.servers.resolved_addresses import Address, address_of, fault_of
from rft_trainer.rewards.servers.server_wait import ServerWait, StillAway

TOKEN = "RFT_REMOTE_TOKEN"
"""Variable of the environment whose value is sent as a bearer token, where it is set."""

_LARGEST = 16 << 20
"""Bytes of an answer; reading one takes about twice that."""
_FIRST_WAIT = 0.1
_MOST_REDIRECTS = 4
_REDIRECTS = (307, 308)
"""Codes of a redirect that sends the same request again; after another one it would be a GET without its body."""
_AWAY_CODES = (408, 429, 502, 503, 504)
"""Codes of servers, and of proxies before them, that say: not now."""


class RequestFailure(Exception):
    """Error of a request without a usable answer: `status` for the responses, and what happened.

    `is_away`: the same request may be answered later. `may_pass`: it is worth a few tries. `retry_after`: seconds that
    the server asked for.
    """

    def __init__(
        self,
        status: RewardStatus,
        detail: str,
        *,
        is_away: bool = False,
        may_pass: bool = False,
        retry_after: float | None = None,
    ) -> None:
        # an answer or an error of the network may quote the request
        detail = scrub_text(detail)
        super().__init__(detail)
        self.status, self.detail = status, detail
        self.is_away, self.may_pass, self.retry_after = is_away, may_pass, retry_after


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a server, with deadline and retries. Example: `Endpoint("http://localhost:9000/score")`."""

    url: str
    """As it is set and shown: ${NAME} in it stands for a variable of the environment."""
    seconds: float = 120.0
    """For one request with all its tries."""
    retries: int = 3
    sleep: Callable[[float], None] = field(default=time.sleep, compare=False)
    wait: ServerWait | None = field(default=None, compare=False)
    """Of this server; None = one that is away is not waited for."""

    @property
    def parts(self) -> SplitResult:
        """Components of the URL with the values of its variables, parsed."""
        return urlsplit(_expanded(self.url))

    def post(self, payload: object, probe: object = None, *, waits: bool = True) -> Any:
        """Send a request and return the answer's JSON value.

        Args:
            payload: JSON.
            probe: a small request, by which a server that hangs is told from one that this request is too much for.
            waits: for a server that is away, as `wait` says.

        Raises:
            RequestFailure: no answer in time, another code than 200, no JSON, a server that is not waited for.
            OutageError: the server was away for longer than it is waited for.
        """
        body, wait = json.dumps(payload).encode(), self.wait
        if wait is None or not waits:
            return self._tried(body)
        probes = [] if probe is None else [json.dumps(probe).encode()]
        first, num_pauses = 0.0, 0
        self._begin(wait)
        while True:
            try:
                answer = self._tried(body)
            except RequestFailure as failure:
                if not failure.is_away:
                    wait.answered()
                    raise
                # twice, while the server answered others: it is this request that it cannot answer
                if num_pauses and failure.status is RewardStatus.TIMEOUT and wait.answered_after(first):
                    wait.gave_up()
                    raise
                first = first if num_pauses else wait.now()
                self._pause(wait, failure, num_pauses)
                num_pauses += 1
                if failure.status is RewardStatus.TIMEOUT:
                    self._probe(wait, probes)
            else:
                wait.answered()
                return answer

    def close(self) -> None:
        """End every wait for the server."""
        if self.wait is not None:
            self.wait.close()

    def _begin(self, wait: ServerWait) -> None:
        try:
            wait.begin()
        except StillAway as over:
            raise RequestFailure(RewardStatus.OUTAGE, f"{self.url}: {over}") from over

    def _pause(self, wait: ServerWait, failure: RequestFailure, num_pauses: int) -> None:
        try:
            wait.pause(failure.detail, num_pauses, failure.retry_after)
        except StillAway as over:
            raise RequestFailure(RewardStatus.OUTAGE, failure.detail) from over

    def _probe(self, wait: ServerWait, probes: list[bytes]) -> None:
        """Record whether the server answers a small request."""
        for body in probes:
            with contextlib.suppress(RequestFailure):
                self._tried(body)
                wait.answered()

    def _tried(self, body: bytes) -> Any:
        """Send a request within its time, again after errors of the network and of the server's own code."""
        deadline = time.monotonic() + self.seconds
        wait = _FIRST_WAIT
        for left in range(self.retries, -1, -1):
            try:
                return _parsed(self._exchange(body, deadline), self.url)
            # only what a second try may mend; any other answer of the server is final
            except RequestFailure as failure:
                if not failure.may_pass or not _has_time(left, wait, deadline):
                    raise
            except _NetworkError as error:
                if not _has_time(left, wait, deadline):
                    raise RequestFailure(RewardStatus.FAILED, f"{self.url}: {error}", is_away=True) from error
            self.sleep(wait)
            wait *= 2
        raise AssertionError

    def _exchange(self, body: bytes, deadline: float) -> bytes:
        parts = self.parts
        visited: list[Address] = []
        for _ in range(_MOST_REDIRECTS):
            answered = self._hop(parts, body, deadline, visited)
            if isinstance(answered, bytes):
                return answered
            parts = same_place(parts, answered, self.url)
        raise RequestFailure(RewardStatus.FAILED, f"{self.url}: more than {_MOST_REDIRECTS - 1} redirects")

    def _hop(self, parts: SplitResult, body: bytes, deadline: float, visited: list[Address]) -> bytes | str:
        """Send a request to one place: the content of its answer, or where it redirects to.

        `visited` are the addresses of this request so far, to which this one is added.
        """
        # at least a millisecond: a timeout of 0 would make the socket non-blocking
        seconds = max(deadline - time.monotonic(), 0.001)
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
            self._refuse_inside(parts.hostname, connection.sock, visited)
            content = _answer(connection, parts, body, self.url)
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

    def _refuse_inside(self, name: str, connected: socket.socket, visited: list[Address]) -> None:
        """Raise `RequestFailure` where the name has led to an address that is none of a server, before any is sent."""
        found = address_of(connected.getpeername())
        if found is None:
            return
        fault = fault_of(name, found, visited[0] if visited else None)
        if fault:
            raise RequestFailure(RewardStatus.FAILED, f"{self.url}: {fault}: nothing was sent")
        visited.append(found)

    def _late(self) -> RequestFailure:
        what = f"{self.url}: no answer within {self.seconds:g} s"
        return RequestFailure(RewardStatus.TIMEOUT, what, is_away=True)


def _has_time(num_tries: int, wait: float, deadline: float) -> bool:
    """Return whether another try is left whose wait does not end behind the deadline."""
    return num_tries > 0 and time.monotonic() + wait < deadline


_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def _expanded(url: str) -> str:
    """Return the URL with the values of its variables; one that is not set stays as it is."""
    return _VARIABLE.sub(lambda found: os.environ.get(found[1], found[0]), url)


def checked_url(url: str, flag: str) -> str:
    """Return the URL as it is set, if requests can be sent to it; ${NAME} in it is a variable of the environment.

    Raises:
        OptionsError: another scheme than http and https, no host, a variable that is not set, or a password or token
            in it, which would be written into the run's files.
    """
    for name in _VARIABLE.findall(url):
        if name not in os.environ:
            what = f"{flag}: the URL needs the variable {name} of the environment, which is not set"
            raise _refused(what, flag, "secrets of a URL are not stored with the run", f"export {name}=...")
    parts = urlsplit(_expanded(url))
    if secret := next((name for name, value in parse_qsl(urlsplit(url).query) if _in_clear(name, value)), ""):
        what = f"{flag}: the URL of {parts.hostname} holds a secret, its parameter {secret}"
        why = "settings are written into the run's config.yaml"
        do = f"{flag} '{parts.scheme}://{parts.netloc}{parts.path}?{secret}=${{RM_TOKEN}}', and export RM_TOKEN=..."
        raise _refused(what, flag, why, do)
    if parts.username or parts.password:
        what = f"{flag}: the URL of {parts.hostname} holds a user name or a password"
        why = "settings are written into the run's config.yaml"
        raise _refused(what, flag, why, f"{flag} {parts.scheme}://{parts.hostname}{parts.path}, and {TOKEN}=...")
    if parts.scheme not in ("http", "https") or not parts.hostname or not _has_port(parts):
        why = "requests are sent over HTTP to a named host"
        raise _refused(f"{flag} = {scrub_text(url)!r}", flag, why, f"{flag} http://localhost:8000/score")
    return url


def _refused(what: str, flag: str, why: str, do: str) -> OptionsError:
    return OptionsError(code="reward.url", what=what, where=flag, why=why, do=do)


def _in_clear(name: str, value: str) -> bool:
    return not _VARIABLE.fullmatch(value) and holds_secret(name, value)


def _has_port(parts: SplitResult) -> bool:
    """Return whether the port is a number, or none is given."""
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False


class _NetworkError(Exception):
    """Network error that is worth a retry."""


def same_place(typed: SplitResult, location: str, where: str) -> SplitResult:
    """Return where a redirect leads, which is the host and port that were typed, or HTTPS on the same host.

    An address in an answer may be one that only this machine reaches: none but the typed one is asked.

    Raises:
        RequestFailure: another host or port, or no address.
    """
    try:
        found = urlsplit(urljoin(typed.geturl(), location))
        place = (found.scheme, found.hostname, found.port or _PORTS.get(found.scheme))
    except ValueError:
        found, place = urlsplit(""), None
    port = typed.port or _PORTS[typed.scheme]
    allowed = {(typed.scheme, typed.hostname, port)}
    if typed.scheme == "http" and port == _PORTS["http"]:
        allowed.add(("https", typed.hostname, _PORTS["https"]))
    if place not in allowed or found.username or found.password:
        shown = visible(location[:200])
        message = f"{where}: redirects to {shown!r}, which is not followed: only the address that was given is asked"
        raise RequestFailure(RewardStatus.FAILED, message)
    return found


_PORTS = {"http": 80, "https": 443}


def _answer(connection: http.client.HTTPConnection, parts: SplitResult, body: bytes, where: str) -> bytes | str:
    """Return the content of an answer, or where it redirects to."""
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    token = os.environ.get(TOKEN)
    if token:
        headers["Authorization"] = f"Bearer {token}"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection.request("POST", path, body, headers)
    response = connection.getresponse()
    if response.status in _REDIRECTS:
        return response.headers.get("Location") or ""
    # one byte more than allowed, which shows that there is more
    content = response.read(_LARGEST + 1)
    # what the stated length still lacks: a body that was cut off may be valid JSON all the same
    if response.length and len(content) <= _LARGEST:
        raise http.client.IncompleteRead(content, response.length)
    if response.status != http.client.OK:
        said = content[:200].decode(errors="replace").strip()
        raise RequestFailure(
            RewardStatus.FAILED,
            f"{where}: HTTP {response.status} {response.reason}" + (f": {said}" if said else ""),
            is_away=response.status in _AWAY_CODES,
            may_pass=response.status == http.client.INTERNAL_SERVER_ERROR,
            retry_after=retry_seconds(response.headers.get("Retry-After")),
        )
    if len(content) > _LARGEST:
        raise RequestFailure(RewardStatus.FAILED, f"{where}: the answer is larger than {_LARGEST >> 20} MiB")
    return content


def retry_seconds(text: str | None, now: Callable[[], float] = time.time) -> float | None:
    """Return the seconds of a Retry-After header, a number or an HTTP date; None where it holds neither."""
    if not text:
        return None
    if text.strip().isdecimal():
        # a float, and not an integer of any length: an absurd number is as long as the wait allows
        return min(float(text), 1e9)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - now())
    except (ValueError, OverflowError):
        return None


def _parsed(content: bytes, url: str) -> Any:
    try:
        return json.loads(content, object_pairs_hook=_unique)
    except _RepeatedNameError as error:
        raise RequestFailure(RewardStatus.FAILED, f"{url}: the answer has {error} twice") from error
    except (ValueError, RecursionError) as error:
        raise RequestFailure(RewardStatus.FAILED, f"{url}: the answer is no JSON: {content[:80]!r}") from error


class _RepeatedNameError(ValueError):
    """Error of an object in which a name stands twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs: which of two values of one name was meant cannot be told."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedNameError(visible(repr(next(name for name in names if names.count(name) > 1)[:80])))
    return found


def _cut(sock: socket.socket) -> None:
    """Shut the connection down, which wakes the thread that waits for its bytes."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # of a TLS socket too: its own would first say goodbye
