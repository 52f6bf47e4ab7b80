"""Redirects of a request over HTTP: which addresses are asked, and how many of them."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest

from rft_trainer.records.scores import RewardStatus
from rft_trainer.rewards.servers.http_client import Endpoint, RequestFailure, same_place

PLACES = [
    ("http://h/score", "/score/", "http://h/score/"),
    ("http://h/score", "http://h:80/b?x=1", "http://h:80/b?x=1"),
    ("http://h/score", "https://h/score", "https://h/score"),
    ("http://10.0.0.5:9000/score", "http://10.0.0.5:9000/", "http://10.0.0.5:9000/"),
]
OTHERS = [
    "http://other/score",
    "http://h:22/",
    "http://127.0.0.1/",
    "http://2130706433/",
    "http://0177.0.0.1/",
    "http://[::1]/",
    "http://[::ffff:169.254.169.254]/latest/meta-data",
    "//169.254.169.254/latest",
    "http://h@169.254.169.254/",
    "http://user:password@h/",
    "http://h.evil.example/",
    "https://h:8443/",
    "ftp://h/",
    "file:///etc/passwd",
    "gopher://h:80/_x",
    "http://h:99999/",
    "http://[",
]


@pytest.mark.parametrize(("typed", "location", "followed"), PLACES)
def test_a_redirect_within_the_typed_place_is_followed(typed: str, location: str, followed: str) -> None:
    assert same_place(urlsplit(typed), location, "URL").geturl() == followed


@pytest.mark.parametrize("location", OTHERS)
def test_no_other_address_of_a_redirect_is_asked(location: str) -> None:
    with pytest.raises(RequestFailure) as caught:
        same_place(urlsplit("http://h/score"), location, "http://h/score")
    assert caught.value.status is RewardStatus.FAILED
    assert not caught.value.is_away
    assert "is not followed" in caught.value.detail


def test_a_redirect_brings_the_same_request_again_and_its_number_is_bounded() -> None:
    seen: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            seen.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            loops = self.path.startswith("/loop")
            self.send_response(307 if self.path == "/a" or loops else 200)
            self.send_header("Location", "/loop" if loops else "/b")
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        assert Endpoint(f"{url}/a", 20.0, 0).post({"x": 1}) == {}
        assert seen == [("/a", b'{"x": 1}'), ("/b", b'{"x": 1}')]
        with pytest.raises(RequestFailure, match="more than 3 redirects"):
            Endpoint(f"{url}/loop", 20.0, 0).post({})
        assert len(seen) == 6
    finally:
        server.shutdown()
        server.server_close()
