"""The dashboard's server: what it answers, and whom."""

import gzip
import http.client
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rft.dashboard.json_answers import DashboardAnswers
from rft.dashboard.run_folders import RunFolders
from rft.dashboard.served import lines
from rft.dashboard.web_server import serving
from rft.resolved import Resolved
from rft.settings import DashboardPageSettings, DashboardSettings
from rft_core.errors import OptionsError

Make = Callable[..., Path]
TOKEN = "a-token-of-the-tests"


@dataclass
class Answer:
    """What came back."""

    code: int
    headers: dict[str, str]
    body: bytes


def ask(url: str, path: str = "/", *, method: str = "GET", body: str | None = None, **headers: str) -> Answer:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port or 0, timeout=20)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return Answer(answer.status, dict(answer.getheaders()), answer.read())
    finally:
        connection.close()


@pytest.fixture
def answers(folder: Path, make_run: Make) -> DashboardAnswers:
    make_run()
    return DashboardAnswers(RunFolders([folder]))


@pytest.fixture
def url(answers: DashboardAnswers, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv("RFT_REMOTE_TOKEN", raising=False)
    with serving(answers, "127.0.0.1", 0) as address:
        yield address


@pytest.fixture
def guarded(answers: DashboardAnswers, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("RFT_REMOTE_TOKEN", TOKEN)
    with serving(answers, "127.0.0.1", 0) as address:
        yield address


def test_the_page_and_its_files_are_served_with_a_policy_that_confines_them(url: str) -> None:
    page = ask(url)
    assert (page.code, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    text = page.body.decode()
    assert "//" not in text.replace("<!doctype", "")  # nothing from elsewhere
    for name in ("main.js", "dashboard.css", "uPlot.iife.min.js"):
        assert f"/{name}" in text
        assert ask(url, f"/{name}").code == 200
    script = ask(url, "/main.js").body.decode()
    for line in script.splitlines():
        if line.startswith("import"):
            assert ask(url, "/" + line.rpartition("./")[2].rstrip('";')).code == 200


def test_answers_are_json_and_packed_where_the_browser_can_unpack(url: str) -> None:
    found = ask(url, "/api/runs")
    assert json.loads(found.body)["runs"][0]["name"] == "mine"
    assert found.headers["Cache-Control"] == "no-store"
    packed = ask(url, "/uPlot.iife.min.js", Accept_Encoding="gzip")
    assert gzip.decompress(packed.body) == ask(url, "/uPlot.iife.min.js").body


def test_no_path_leads_to_another_file(url: str) -> None:
    names = ("/../settings.py", "/%2e%2e/settings.py", "/assets/index.html", "//etc/passwd", "/token.html")
    for path in (*names, "/api/run?run=..%2f.."):
        answer = ask(url, path)
        assert answer.code == 404
        assert b"import" not in answer.body


def test_a_page_of_another_name_is_refused(url: str) -> None:
    assert ask(url, "/api/runs", Host="evil.example").code == 403
    assert ask(url, "/api/runs", Host="[").code == 403
    assert ask(url, "/api/runs", Host="localhost:1").code == 200
    assert ask(url, "/token", method="POST", body="token=x").code == 401
    assert ask(url, "/api/runs", method="PUT").code == 501


def test_a_token_is_asked_for_and_a_cookie_stands_for_it(guarded: str) -> None:
    assert ask(guarded, "/api/runs").code == 401
    assert ask(guarded, "/main.js").code == 401
    page = ask(guarded)
    assert (page.code, b'type="password"' in page.body) == (401, True)
    wrong = ask(guarded, "/token", method="POST", body="token=wrong")
    assert (wrong.code, "Set-Cookie" in wrong.headers) == (401, False)
    taken = ask(guarded, "/token", method="POST", body=f"token={TOKEN}")
    assert (taken.code, taken.headers["Location"]) == (303, "/")
    cookie = taken.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert TOKEN not in cookie
    assert ask(guarded, "/api/runs", Cookie=cookie.partition(";")[0]).code == 200
    assert ask(guarded, "/api/runs", Cookie="rft_dashboard=x").code == 401
    assert ask(guarded, "/api/runs", Authorization=f"Bearer {TOKEN}").code == 200
    # whoever has the token may use any name of the machine
    assert ask(guarded, "/api/runs", Authorization=f"Bearer {TOKEN}", Host="node-7:1").code == 200


def test_a_form_that_is_too_large_is_not_read(guarded: str) -> None:
    assert ask(guarded, "/token", method="POST", body="token=" + "x" * 5000).code == 413
    assert ask(guarded, "/other", method="POST", body="").code == 404


def test_another_address_needs_a_token(answers: DashboardAnswers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RFT_REMOTE_TOKEN", raising=False)
    with pytest.raises(OptionsError) as caught, serving(answers, "0.0.0.0", 0):
        pass
    assert caught.value.problem.code == "serving.no_token"


def test_the_port_is_free_after_the_end(answers: DashboardAnswers) -> None:
    with serving(answers, "127.0.0.1", 0) as address:
        port = int(urlsplit(address).port or 0)
        assert port > 0
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)) as again:
        assert again.getsockname()[1] == port


def test_a_fault_of_an_answer_is_told_without_its_details(
    url: str, answers: DashboardAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise ValueError("/a/secret/path")

    monkeypatch.setattr(answers, "of", fail)
    found = ask(url, "/api/runs")
    assert (found.code, b"secret" in found.body) == (500, False)


def test_the_command_says_where_and_ends_when_it_is_stopped(
    folder: Path, make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RFT_REMOTE_TOKEN", raising=False)
    make_run()
    settings = DashboardSettings(dashboard=DashboardPageSettings(folders=f"{folder}, {folder / 'mine'}", port=0))
    told = lines(Resolved("dashboard", settings, {}, {}, "", (), (), ""))
    first = next(told)
    assert first.endswith("for a browser: 1 run so far")
    address = first.split()[1]
    assert ask(address).code == 200
    told.close()
    with pytest.raises(ConnectionError):
        ask(address)
