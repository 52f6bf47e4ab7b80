"""A reward server of raw sockets that breaks off, floods, drips or answers whatever bytes it is told to."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

CHUNK = bytes(1 << 20)
LENGTH_OF_A_FLOOD = 10 << 30
REASONS = {"429": "Too Many Requests", "500": "Error", "503": "Unavailable", "504": "Gateway Timeout"}


class FaultyServer:
    """Does what `fault` says to every request, or sends `body` as a whole answer where that is empty."""

    def __init__(self) -> None:
        self.fault, self.num_requests = "", 0
        self.body: Callable[[dict[str, Any]], bytes] = _lengths
        self._closed = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/score"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Let everybody go."""
        self._closed.set()
        self._socket.close()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection, self.fault), daemon=True).start()

    def _answer(self, connection: socket.socket, fault: str) -> None:
        with connection, contextlib.suppress(OSError):
            request = _request(connection)
            self.num_requests += 1
            if fault == "reset":
                # closed with a linger of no time, a connection is reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif fault == "hang":
                self._wait(connection)
            elif fault == "drip":
                connection.sendall(_head(100))
                while not self._closed.wait(0.05):
                    connection.sendall(b" ")
            elif fault in ("flood", "endless"):
                chunked = fault == "endless"
                connection.sendall(_head(None if chunked else LENGTH_OF_A_FLOOD))
                while not self._closed.is_set():
                    connection.sendall(b"100000\r\n" + CHUNK + b"\r\n" if chunked else CHUNK)
            else:
                connection.sendall(self._whole(fault, request))

    def _whole(self, fault: str, request: dict[str, Any]) -> bytes:
        body = self.body(request)
        if fault == "cut":
            return _head(len(body)) + body[: len(body) // 2]
        if fault == "page":
            body = b"<html><body>Welcome to 1 proxy</body></html>"
            return _head(len(body), kind="text/html") + body
        return _head(len(body), f"{fault} {REASONS[fault]}" if fault else "200 OK") + body

    def _wait(self, connection: socket.socket) -> None:
        """Until the client has gone."""
        connection.settimeout(0.1)
        until = time.monotonic() + 30
        while not self._closed.is_set() and time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                if not connection.recv(1):
                    return


def _head(length: int | None, status: str = "200 OK", kind: str = "application/json") -> bytes:
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{size}\r\nConnection: close\r\n\r\n".encode()


def _request(connection: socket.socket) -> dict[str, Any]:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536) or b"\r\n\r\n"
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [line.partition(b":")[2] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    while len(body) < int((lengths or [b"0"])[0]):
        body += connection.recv(65536)
    return json.loads(body) if body else {}


def _lengths(request: dict[str, Any]) -> bytes:
    return json.dumps({"rewards": [float(len(text)) for text in request["responses"]]}).encode()
