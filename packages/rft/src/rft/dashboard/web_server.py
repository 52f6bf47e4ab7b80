"""The dashboard's server: files of the page, JSON under /api, a token where others can ask, headers that confine."""

from __future__ import annotations

import gzip
import hmac
import logging
import secrets
import socket
import threading
import traceback
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rft.dashboard.json_answers import DashboardAnswers, encoded
from rft.dashboard.run_folders import RequestRefused
from rft.serving.addresses import is_loopback
from rft.serving.listening import checked_token, listening_socket
from rft_core.terminal_text import visible
from rft_trainer.rewards.servers.http_client import TOKEN

_LOG = logging.getLogger(__name__)
COOKIE = "rft_dashboard"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""The page runs its own files alone, and nothing that a run holds."""
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_JSON = "application/json"
_ASSETS = {
    "/": ("rft.dashboard", "index.html"),
    **{f"/{name}": ("rft.report", name) for name in ("uPlot.iife.min.js", "uPlot.min.css", "report.css")},
    **{
        f"/{name}": ("rft.dashboard", name)
        for name in (
            *("dashboard.css", "main.js", "page_parts.js", "live_curves.js", "run_list.js", "run_page.js"),
            *("compare_page.js", "samples_page.js"),
        )
    },
}
_LARGEST_FORM = 4096
_READ_SECONDS = 20.0
_MOST_CONNECTIONS = 64
_WORTH_PACKING = 1400


class _Server(ThreadingHTTPServer):
    """Threads that answer, at most `_MOST_CONNECTIONS` of them, on a socket that listens already."""

    daemon_threads = True

    def __init__(self, listening: socket.socket, answers: DashboardAnswers, host: str, token: str) -> None:
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.answers, self.host, self.token = answers, host, token
        # of this start of the server: who reads it learns no token
        self.session = secrets.token_urlsafe(32)
        self._slots = threading.BoundedSemaphore(_MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request
        _LOG.debug("a request of %s was cut off", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One request; the connection is closed behind it."""

    server: _Server  # type: ignore[assignment]  # the class above makes this one
    timeout = _READ_SECONDS
    server_version, sys_version = "rft", ""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        del format, args

    def _answer(self, act: Any) -> None:
        try:
            self._check_host()
            act()
        except RequestRefused as refused:
            self._send(refused.code, _JSON, encoded({"error": refused.detail}))
        except (ConnectionError, TimeoutError):
            raise
        except Exception:  # noqa: BLE001 - whatever an answer raises is the end of its request alone
            # a terminal shows it, and a message may quote what a run holds
            _LOG.error("a request of the dashboard failed: %s", visible(traceback.format_exc()))
            self._send(500, _JSON, encoded({"error": "this answer could not be made; the log of the server says why"}))

    def _check_host(self) -> None:
        """Refuse a page of the web that has a name of its own lead to this machine; a token stands for itself."""
        if self.server.token or not is_loopback(self.server.host):
            return
        try:
            named = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:
            named = ""
        if not is_loopback(named):
            raise RequestRefused(403, f"the request is for another host, and this server is {self.server.host}")

    def _get(self) -> None:
        address = urlsplit(self.path)
        if address.path in _ASSETS and (self._is_known() or address.path.endswith(".css")):
            self._send_file(*_ASSETS[address.path])
        elif self._is_known():
            parameters = parse_qs(address.query, max_num_fields=200)
            self._send(200, _JSON, encoded(self.server.answers.of(address.path, parameters)))
        elif address.path == "/":
            self._send_file("rft.dashboard", "token.html", 401)
        else:
            raise RequestRefused(401, f"the token is missing or another one; it is that of {TOKEN} at the server")

    def _post(self) -> None:
        """Take the token of the form, and give the browser a cookie in its place."""
        if urlsplit(self.path).path != "/token":
            raise RequestRefused(404, "there is no such page")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length[:9]) > _LARGEST_FORM:
            raise RequestRefused(413, f"a form has at most {_LARGEST_FORM} bytes")
        fields = parse_qs(self.rfile.read(int(length)).decode("utf-8", errors="replace"), max_num_fields=4)
        given = next(iter(fields.get("token", ())), "")
        if not self.server.token or not _same(given, self.server.token):
            self._send_file("rft.dashboard", "token.html", 401)
            return
        cookie = f"{COOKIE}={self.server.session}; HttpOnly; SameSite=Strict; Path=/"
        self._send(303, "text/plain", b"", {"Set-Cookie": cookie, "Location": "/"})

    def _is_known(self) -> bool:
        """Return whether the request brings the token, or the cookie for it; True where none is asked for."""
        if not self.server.token:
            return True
        if _same(self.headers.get("Authorization", ""), f"Bearer {self.server.token}"):
            return True
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and _same(cookie.value, self.server.session)

    def _send_file(self, package: str, name: str, code: int = 200) -> None:
        content = files(package).joinpath("assets", name).read_bytes()
        self._send(code, _TYPES[name.rpartition(".")[2]], content)

    def _send(self, code: int, kind: str, content: bytes, more: Mapping[str, str] | None = None) -> None:
        headers = {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8", **(more or {})}
        if len(content) > _WORTH_PACKING and "gzip" in self.headers.get("Accept-Encoding", ""):
            content = gzip.compress(content, 3)
            headers["Content-Encoding"] = "gzip"
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serving(answers: DashboardAnswers, host: str, port: int) -> Generator[str]:
    """Answer requests while the block runs; yields the address for a browser.

    Raises:
        OptionsError: another address than this machine's without a token, or one that cannot be listened on.
    """
    token = checked_token(host)
    with listening_socket(host, port) as listening:
        server = _Server(listening, answers, host, token)
        # looks for its end so often, in seconds
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="dashboard", daemon=True)
        thread.start()
        try:
            shown = f"[{host}]" if ":" in host else host
            yield f"http://{shown}:{listening.getsockname()[1]}/"
        finally:
            server.shutdown()
            thread.join()


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())
