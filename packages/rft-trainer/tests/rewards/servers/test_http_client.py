"""One request over HTTP by doubles of connection, clock and timer: what is sent, what is tried again, what is late."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from rft_core.errors import OptionsError, OutageError
from rft_trainer.records.scores import RewardStatus
from rft_trainer.rewards.servers import http_client
from rft_trainer.rewards.servers.circuit_breaker import Backoff
from rft_trainer.rewards.servers.http_client import (
    TOKEN,
    Endpoint,
    RequestFailure,
    checked_url,
    retry_seconds,
)
from rft_trainer.rewards.servers.server_wait import ServerWait, WaitRules

URL = "http://host:9/score"


@dataclass(slots=True)
class Response:
    """An answer of so many bytes more than it has."""

    content: bytes = b"[1]"
    status: int = 200
    length: int | None = 0
    reason: str = "said"
    headers: dict[str, str] = field(default_factory=dict[str, str])
    asked: int = 0

    def read(self, most: int) -> bytes:
        self.asked = most
        return self.content[:most]


class Socket(str):
    """Connected to the address that it is made of; equal to any other."""

    __slots__ = ("address",)

    def __new__(cls, address: str) -> Socket:
        made = super().__new__(cls, "the socket")
        made.address = address
        return made

    def getpeername(self) -> tuple[str, int]:
        return self.address, 80


@dataclass(slots=True)
class World:
    """What the connections of a test do, and what they were asked."""

    now: float = 1000.0
    answers: list[Response | BaseException] = field(default_factory=list[Response | BaseException])
    log: list[Any] = field(default_factory=list[Any])
    timers: list[Any] = field(default_factory=list[Any])
    takes: float = 0.0
    """Seconds that an answer takes."""
    refuses: BaseException | None = None
    """What connecting raises."""
    peers: list[str] = field(default_factory=list[str])
    """Addresses of the next connections."""

    def sleep(self, seconds: float) -> None:
        self.log.append(("sleep", seconds))
        self.now += seconds

    def endpoint(self, *options: Any, url: str = URL) -> Endpoint:
        return Endpoint(url, *options, sleep=self.sleep)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()

    class Connection:
        scheme = "http"

        def __init__(self, host: str, port: int | None, *, timeout: float) -> None:
            made.log.append((self.scheme, host, port, timeout))
            self.sock: Any = None

        def connect(self) -> None:
            if made.refuses is not None:
                raise made.refuses
            self.sock = Socket(made.peers.pop(0) if made.peers else "10.0.0.5")

        def request(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
            made.log.append((method, path, json.loads(body), headers))

        def getresponse(self) -> Response:
            made.now += made.takes
            answer = made.answers.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        def close(self) -> None:
            made.log.append("close")

    class SecureConnection(Connection):
        scheme = "https"

    class Timer:
        daemon = False

        def __init__(self, seconds: float, function: Callable[..., None], arguments: list[Any]) -> None:
            self.given, self.states = (seconds, function, arguments), list[Any]()
            made.timers.append(self)

        def start(self) -> None:
            self.states.append(("started", self.daemon))

        def cancel(self) -> None:
            self.states.append("cancelled")

    monkeypatch.setattr(http.client, "HTTPConnection", Connection)
    monkeypatch.setattr(http.client, "HTTPSConnection", SecureConnection)
    monkeypatch.setattr(http_client, "threading", SimpleNamespace(Timer=Timer))
    monkeypatch.setattr(http_client, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.delenv(TOKEN, raising=False)
    return made


def failure(world: World, *options: Any) -> RequestFailure:
    with pytest.raises(RequestFailure) as caught:
        world.endpoint(*options).post({})
    return caught.value


HEADERS = {"Content-Type": "application/json", "Accept": "application/json"}


def test_a_request_is_sent_with_its_time_and_the_answer_is_its_json(world: World) -> None:
    world.answers = [response := Response(b'{"a": 1}')]
    assert world.endpoint(30.0).post({"x": [1]}) == {"a": 1}
    assert world.log == [("http", "host", 9, 30.0), ("POST", "/score", {"x": [1]}, HEADERS), "close"]
    assert response.asked == 16 * 2**20 + 1
    [timer] = world.timers
    assert timer.given[0] == 30.0
    assert timer.given[2] == ["the socket"]
    assert timer.states == [("started", True), "cancelled"]


def test_the_timer_shuts_the_connection_whatever_its_state(world: World) -> None:
    world.answers = [Response()]
    world.endpoint().post({})
    cut = world.timers[0].given[1]
    here, there = socket.socketpair()
    cut(here)
    assert there.recv(1) == b"", "the other end sees its end"
    here.close()
    there.close()
    cut(here)


@pytest.mark.parametrize(
    ("url", "kind", "host", "port", "path"),
    [
        ("https://host", "https", "host", None, "/"),
        ("http://host:80?a=1&b=2", "http", "host", 80, "/?a=1&b=2"),
        ("http://host/x/y?q", "http", "host", None, "/x/y?q"),
    ],
)
def test_scheme_host_port_path_and_query_are_those_of_the_url(
    world: World, url: str, kind: str, host: str, port: int | None, path: str
) -> None:
    world.answers = [Response()]
    world.endpoint(5.0, url=url).post(None)
    assert world.log[:2] == [(kind, host, port, 5.0), ("POST", path, None, HEADERS)]


def test_a_token_goes_along_where_it_is_set(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, sent in (("abc", {"Authorization": "Bearer abc"}), ("", {})):
        monkeypatch.setenv(TOKEN, value)
        world.log.clear()
        world.answers = [Response()]
        world.endpoint().post({})
        assert world.log[1][-1] == HEADERS | sent


def test_network_errors_are_tried_again_after_longer_and_longer_waits(world: World) -> None:
    world.answers = [OSError("a"), http.client.IncompleteRead(b""), OSError("c"), OSError("d"), Response()]
    failed = failure(world)
    assert failed.status is RewardStatus.FAILED
    assert [entry for entry in world.log if entry[0] == "sleep"] == [("sleep", 0.1), ("sleep", 0.2), ("sleep", 0.4)]
    assert len(world.timers) == 4, "three retries where nothing else is said"
    timeouts = [entry[3] for entry in world.log if entry[0] == "http"]
    assert timeouts == pytest.approx([120.0, 119.9, 119.7, 119.3])
    assert [timer.given[0] for timer in world.timers] == pytest.approx(timeouts)


def test_the_answer_of_a_second_try_counts(world: World) -> None:
    world.answers = [OSError("a"), Response(b"7")]
    assert world.endpoint(9.0, 1).post({}) == 7
    world.answers = [OSError("a"), Response(b"7")]
    assert failure(world, 9.0, 0).status is RewardStatus.FAILED


def test_no_wait_ends_behind_the_deadline(world: World) -> None:
    world.now = 0.0
    world.answers = [OSError("a"), OSError("b"), Response()]
    assert failure(world, 0.1, 5).status is RewardStatus.FAILED
    assert len(world.answers) == 2, "a wait that ends with the time is not begun"
    world.log.clear()
    world.now, world.answers = 0.0, [OSError("a"), OSError("b"), Response()]
    assert failure(world, 0.25, 5).status is RewardStatus.FAILED
    assert world.log.count(("sleep", 0.1)) == 1
    assert ("sleep", 0.2) not in world.log


def test_a_connection_has_a_millisecond_where_no_time_is_left(world: World) -> None:
    world.answers = [TimeoutError()]
    assert failure(world, 0.0).status is RewardStatus.TIMEOUT
    assert world.log[0] == ("http", "host", 9, 0.001)


@pytest.mark.parametrize(
    ("answer", "takes", "status"),
    [
        (TimeoutError(), 0.0, RewardStatus.TIMEOUT),
        (Response(), 7.0, RewardStatus.OK),
        (Response(), 8.0, RewardStatus.TIMEOUT),
        (OSError("cut"), 8.0, RewardStatus.TIMEOUT),
        (http.client.BadStatusLine("x"), 8.0, RewardStatus.TIMEOUT),
        (http.client.BadStatusLine("x"), 0.0, RewardStatus.FAILED),
        (ssl.SSLCertVerificationError("x"), 0.0, RewardStatus.FAILED),
        (UnicodeError("x"), 0.0, RewardStatus.FAILED),
        (ValueError("x"), 0.0, RewardStatus.FAILED),
    ],
)
def test_what_a_second_try_would_not_mend_is_final(
    world: World, answer: Response | BaseException, takes: float, status: RewardStatus
) -> None:
    world.answers, world.takes = [answer, Response(b"2")], takes
    if status is RewardStatus.OK:
        assert world.endpoint(8.0, 3).post({}) == [1]
    else:
        assert failure(world, 8.0, 3).status is status
    assert len(world.answers) == 1
    assert world.log[-1] == "close"
    assert world.timers[0].states[-1] == "cancelled"


def test_a_connection_that_is_refused_is_closed_and_has_no_timer(world: World) -> None:
    world.refuses = ConnectionRefusedError("x")
    assert failure(world, 8.0, 0).status is RewardStatus.FAILED
    assert (world.log[-1], world.timers) == ("close", [])


def test_a_body_shorter_than_stated_is_a_network_error_and_one_of_unstated_length_is_whole(world: World) -> None:
    world.answers = [Response(length=1), Response(b"3", length=None)]
    assert world.endpoint(8.0, 1).post({}) == 3
    assert world.answers == []


@pytest.mark.parametrize(
    "response", [Response(status=501), Response(status=201), Response(b"{"), Response(b"[" * 10**5)]
)
def test_another_code_than_200_and_what_is_no_json_are_failures(world: World, response: Response) -> None:
    world.answers = [response]
    assert failure(world, 8.0, 3).status is RewardStatus.FAILED


def test_an_error_of_the_servers_own_code_is_tried_a_few_times_and_not_waited_for(world: World) -> None:
    world.answers = [Response(status=500), Response(status=500), Response(b"7")]
    assert world.endpoint(8.0, 2).post({}) == 7
    world.answers = [Response(status=500)] * 9
    assert failure(world, 8.0, 2).status is RewardStatus.FAILED
    assert len(world.answers) == 9 - 3
    with pytest.raises(RequestFailure):
        waiting(world).post({})


def test_an_answer_may_be_as_large_as_the_limit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_LARGEST", 4)
    world.answers = [Response(b"[12]")]
    assert world.endpoint().post({}) == [12]
    for length in (0, 9, None):
        world.answers = [Response(b"[123]", length=length), Response()]
        assert failure(world, 8.0, 1).status is RewardStatus.FAILED
        assert len(world.answers) == 1, "not a network error"


def test_endpoints_are_the_same_whatever_way_they_wait() -> None:
    assert Endpoint(URL, 3.0, 2, sleep=print) == Endpoint(URL, 3.0, 2)
    assert Endpoint(URL, 3.0, 2) != Endpoint(URL, 3.0, 1)


@pytest.mark.parametrize(
    ("url", "accepted"),
    [
        ("http://host:1/x", True),
        ("https://host", True),
        ("http://host:0/x", False),
        ("http://host:99999/x", False),
        ("http://me@host/x", False),
        ("http://:secret@host/x", False),
        ("http://host/x?model=a&keyboard=b", True),
        ("http://host/x?token=abc", False),
        ("http://host/x?a=1&api_key=abc", False),
        ("http://host/x?a=hf_abcdefghijklmnopqrst", False),
        ("http://host/x?token=${A_TOKEN}", True),
        ("http://host/${PLACE}?key=${A_TOKEN}", True),
        ("http://host/x?token=${NOT_SET}", False),
        ("http://host/x?token=abc${A_TOKEN}", False),
        ("http://me:${A_TOKEN}@host/x", False),
        ("file:///x", False),
        ("ftp://host/x", False),
    ],
)
def test_urls_have_a_scheme_of_http_a_host_a_port_and_no_password(
    url: str, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_TOKEN", "s3cr3t-abc")
    monkeypatch.setenv("PLACE", "score")
    monkeypatch.delenv("NOT_SET", raising=False)
    if accepted:
        assert checked_url(url, "--judge_url") == url
        return
    with pytest.raises(OptionsError) as caught:
        checked_url(url, "--judge_url")
    assert (caught.value.problem.code, caught.value.problem.where) == ("reward.url", "--judge_url")
    assert not {"abc", "secret@", "s3cr3t-abc"} & set(re.split(r"[ =&'?/]", str(caught.value)))


def test_a_secret_of_the_environment_is_sent_and_in_no_message(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_TOKEN", "s3cr3t-abc")
    monkeypatch.setenv("PLACE", "score")
    url = "http://host/${PLACE}?token=${RM_TOKEN}"
    for answer in (Response(b"who is s3cr3t-abc?", status=500), OSError("s3cr3t-abc"), TimeoutError(), Response(b"{")):
        world.answers = [answer]
        with pytest.raises(RequestFailure) as caught:
            world.endpoint(5.0, 0, url=url).post({})
        assert world.log[-2][1] == "/score?token=s3cr3t-abc"
        assert url in caught.value.detail or "no JSON" in caught.value.detail
        assert "s3cr3t-abc" not in caught.value.detail


def waiting(world: World, seconds: float = 60.0, **options: Any) -> Endpoint:
    """An endpoint without retries of its own that waits for its server by the clock of the test."""

    def sleep(length: float) -> None:
        world.now += length

    moments = {"clock": lambda: world.now, "wall_clock": lambda: 0.0, "sleep": sleep}
    rules = WaitRules(seconds, **moments, backoff=Backoff(lambda: 0.0), **options)
    return Endpoint(URL, 5.0, 0, wait=ServerWait("the server", "--flag", rules))


def sent(world: World) -> list[Any]:
    return [entry[2] for entry in world.log if entry[0] == "POST"]


@pytest.mark.parametrize(
    "away",
    [OSError("refused"), http.client.IncompleteRead(b""), TimeoutError()]
    + [Response(status=code) for code in (408, 429, 502, 503, 504)],
)
def test_a_server_that_is_away_is_asked_again_until_it_answers(world: World, away: Response | BaseException) -> None:
    world.answers = [away, OSError("refused"), Response(b"7")]
    assert waiting(world).post({"x": 1}) == 7
    assert sent(world) == [{"x": 1}] * 3


@pytest.mark.parametrize("final", [Response(status=501), Response(status=404), Response(b"{"), ValueError("x")])
def test_an_answer_that_will_not_change_is_not_waited_for(world: World, final: Response | BaseException) -> None:
    world.answers = [final, Response()]
    with pytest.raises(RequestFailure) as caught:
        waiting(world).post({})
    assert caught.value.status is RewardStatus.FAILED
    assert len(world.answers) == 1


def test_the_time_that_the_server_asks_for_is_waited(world: World) -> None:
    world.answers = [Response(status=503, headers={"Retry-After": "17"}), Response()]
    waiting(world).post({})
    assert world.now == pytest.approx(1017.0)


def test_a_server_that_stays_away_ends_the_run_or_leaves_the_responses_unscored(world: World) -> None:
    world.answers = [OSError("refused")] * 20
    with pytest.raises(OutageError):
        waiting(world).post({})
    world.answers = [Response(status=503)] * 20
    with pytest.raises(RequestFailure) as caught:
        waiting(world, goes_on=True).post({})
    assert caught.value.status is RewardStatus.OUTAGE
    assert URL in caught.value.detail
    assert "HTTP 503" in caught.value.detail


def test_a_request_that_times_out_beside_one_that_is_answered_is_that_requests_own_failure(world: World) -> None:
    world.answers = [TimeoutError(), Response(), TimeoutError(), Response()]
    with pytest.raises(RequestFailure) as caught:
        waiting(world).post("large", "small")
    assert caught.value.status is RewardStatus.TIMEOUT
    assert sent(world) == ["large", "small", "large"]


def test_a_request_that_timed_out_in_an_outage_is_answered_after_it(world: World) -> None:
    world.answers = [TimeoutError(), TimeoutError(), TimeoutError(), Response(), Response(b"7")]
    assert waiting(world).post("large", "small") == 7
    assert sent(world) == ["large", "small", "large", "small", "large"]


def test_a_try_that_is_to_be_quick_does_not_wait(world: World) -> None:
    world.answers = [OSError("refused"), Response()]
    with pytest.raises(RequestFailure):
        waiting(world).post({}, waits=False)
    assert len(world.answers) == 1


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, None),
        ("", None),
        ("soon", None),
        ("-3", None),
        ("12", 12.0),
        (" 0 ", 0.0),
        ("9" * 400, 1e9),
        ("Thu, 01 Jan 1970 00:02:00 GMT", 20.0),
        ("Thu, 01 Jan 1970 00:00:10 GMT", 0.0),
        ("Thu, 99 Jan 1970 00:00:10 GMT", None),
    ],
)
def test_retry_after_is_a_number_of_seconds_or_a_date(text: str | None, seconds: float | None) -> None:
    assert retry_seconds(text, lambda: 100.0) == seconds


@pytest.mark.parametrize("peer", ["169.254.169.254", "fe80::1%eth0", "0.0.0.0"])
def test_nothing_is_sent_where_a_name_leads_to_no_server(world: World, peer: str) -> None:
    world.peers, world.answers = [peer], [Response()]
    with pytest.raises(RequestFailure, match="nothing was sent") as caught:
        world.endpoint().post({"secret": 1})
    assert caught.value.status is RewardStatus.FAILED
    assert not caught.value.is_away
    assert [entry for entry in world.log if entry[0] == "POST"] == []


def test_a_redirect_to_a_name_that_now_leads_inside_is_not_sent(world: World) -> None:
    moved = Response(b"", 307, headers={"Location": "/moved"})
    world.peers, world.answers = ["93.184.216.34", "127.0.0.1"], [moved, Response()]
    with pytest.raises(RequestFailure, match=r"93.184.216.34, and for the redirect to 127.0.0.1.*nothing was sent"):
        world.endpoint().post({"secret": 1})
    assert [entry[1] for entry in world.log if entry[0] == "POST"] == ["/score"]
    world.peers, world.answers = ["93.184.216.34", "93.184.216.35"], [moved, Response()]
    assert world.endpoint().post({"secret": 1}) == [1]
