"""A reward server that goes away and comes back: it scores a response by its length."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REFUSALS: dict[str, tuple[int, dict[str, str]]] = {
    "503": (503, {"Retry-After": "0"}),
    "429 with a date": (429, {"Retry-After": "Thu, 01 Jan 2026 00:00:00 GMT"}),
    "408": (408, {"Retry-After": "0"}),
}


class AwayServer:
    """Answers requests but those that it was told to refuse."""

    def __init__(self) -> None:
        self.refused = 0
        self.answered = 0
        self.was_refused = threading.Event()
        self._first, self._last = 0, 0
        self._refusal = REFUSALS["503"]
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                code, headers = outer.decide()
                content = json.dumps({"rewards": outer.scores(body["responses"])}).encode()
                content = content if code == 200 else b""
                self.send_response(code)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/score"

    def scores(self, texts: list[str]) -> list[float]:
        """The lengths."""
        return [float(len(text)) for text in texts]

    def go_away(self, after: int, requests: int = 1_000_000, refusal: str = "503") -> None:
        """Answer `after` requests from now, then refuse so many."""
        with self._lock:
            self.answered = self.refused = 0
            self.was_refused.clear()
            self._first, self._last, self._refusal = after, requests, REFUSALS[refusal]

    def come_back(self) -> None:
        """Answer everything."""
        self.go_away(0, 0)

    def decide(self) -> tuple[int, dict[str, str]]:
        """The answer to one request."""
        with self._lock:
            if self.answered >= self._first and self.refused < self._last:
                self.refused += 1
                self.was_refused.set()
                return self._refusal
            self.answered += 1
            return 200, {}

    def close(self) -> None:
        """Free the port."""
        self._server.shutdown()
        self._server.server_close()
