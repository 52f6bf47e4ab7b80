"""A reward server, and every way in which it can fail: a status each time, never a number."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rft_core.errors import OptionsError, ServiceError
from rft_trainer.records.scores import RewardItem, RewardStatus
from rft_trainer.rewards.servers.http_client import TOKEN, Endpoint, RequestFailure, checked_url
from rft_trainer.rewards.servers.remote_reward_model import RemoteReward

MakeItem = Callable[..., RewardItem]


class Server:
    """Answers with the length of each response, except where a path asks for trouble."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any], str]] = []
        self.at_once = self.most_at_once = 0
        self.release = threading.Event()
        self.entry: object = None
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.answer(self, body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        """One request."""
        path = handler.path.lstrip("/")
        with self._lock:
            self.requests.append((path, body, handler.headers.get("Authorization", "")))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            number = len(self.requests)
        try:
            self._answer(handler, path, [float(len(text)) for text in body["responses"]], number)
        finally:
            if path != "together":
                self._end()

    def _end(self) -> None:
        with self._lock:
            self.at_once -= 1

    def _answer(self, handler: BaseHTTPRequestHandler, path: str, lengths: list[float], number: int) -> None:
        if path == "hung":
            self.release.wait(20)
        if path == "reset" or (path == "once" and number == 1):
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        if path == "together":
            deadline = time.monotonic() + 10
            while self.most_at_once < 3 and time.monotonic() < deadline:
                time.sleep(0.005)
            # before the answer: whoever has it may ask again before this thread goes on
            self._end()
        bodies: dict[str, bytes] = {
            "malformed": b"{rewards: [1",
            "wrong_length": json.dumps({"rewards": [*lengths, 1.0]}).encode(),
            "nan": json.dumps({"rewards": [float("nan"), *lengths[1:]]}).encode(),
            "no_list": json.dumps({"scores": lengths}).encode(),
            "words": json.dumps({"rewards": ["good", True, None, 1e999][: len(lengths)]}).encode(),
            "parts": json.dumps({"rewards": [{"reward": n, "parts": {"short": -n}} for n in lengths]}).encode(),
            "bad_parts": json.dumps({"rewards": [{"reward": n, "parts": {"short": "x"}} for n in lengths]}).encode(),
            "entry": json.dumps({"rewards": [self.entry]}).encode(),
            "deep": b"[" * 100_000,
            "twice": b'{"rewards": [0, 0, 0], "rewards": [1, 2, 3]}',
            "other": json.dumps({"rewards": lengths, "prompt_ids": ["q"] * len(lengths)}).encode(),
            "own": json.dumps({"rewards": lengths, "prompt_ids": ["p"] * len(lengths)}).encode(),
        }
        body = bodies.get(path, json.dumps({"rewards": lengths}).encode())
        handler.send_response(500 if path == "error" else 200)
        handler.send_header("Content-Length", str(len(body) + (10 if path == "cut" else 0)))
        handler.end_headers()
        if path == "drip":
            for letter in body:
                if self.release.wait(0.05):
                    return
                handler.wfile.write(bytes([letter]))
                handler.wfile.flush()
            return
        handler.wfile.write(body)

    def close(self) -> None:
        """Let everybody go."""
        self.release.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def reward(server: Server, path: str, *, seconds: float = 20.0, retries: int = 0, **options: int) -> RemoteReward:
    endpoint = Endpoint(f"{server.url}/{path}", seconds, retries, sleep=lambda _: None)
    return RemoteReward("far", endpoint, **options)


def test_scores_come_back_in_order_with_the_documented_request(server: Server, make_item: MakeItem) -> None:
    turns = ({"role": "user", "content": "1+1"},)
    items = [make_item("x" * n, "2", prompt="1+1=") for n in (3, 1, 2)]
    columns = {"source": "sums", "image": b"x", "nested": [{"a": None}], "odd": math.nan}
    items[1] = RewardItem("q", "1+1=", "x", None, "length", 1, turns, columns=columns)
    scores = reward(server, "score")(items)
    assert [score.value for score in scores] == [3.0, 1.0, 2.0]
    assert scores[0].breakdown == {"far": 3.0}
    [(_, body, _)] = server.requests
    assert body == {
        "queries": ["1+1=xxx", "1+1=x", "1+1=xx"],
        "prompts": ["1+1="] * 3,
        "responses": ["xxx", "x", "xx"],
        "labels": ["2", None, "2"],
        "prompt_ids": ["p", "q", "p"],
        "messages": [[], [{"role": "user", "content": "1+1"}], []],
        "finish_reasons": ["stop", "length", "stop"],
        "num_tokens": [3, 1, 2],
        "columns": [{}, {"source": "sums", "nested": [{"a": None}]}, {}],
    }
    assert reward(server, "score")([]) == []


def test_an_answer_may_repeat_the_ids_of_its_request(server: Server, make_item: MakeItem) -> None:
    [score] = reward(server, "own")([make_item("abc")])
    assert score.value == 3.0


def test_parts_are_told_by_name(server: Server, make_item: MakeItem) -> None:
    [score] = reward(server, "parts")([make_item("abc")])
    assert (score.value, score.breakdown) == (3.0, {"far": 3.0, "far/short": -3.0})


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("error", "HTTP 500"),
        ("malformed", "no JSON"),
        ("wrong_length", "4 rewards for 3 responses"),
        ("no_list", "no list"),
        ("reset", "reset"),
        ("cut", "IncompleteRead"),
        ("bad_parts", "the server answered"),
        ("deep", "no JSON"),
        ("twice", "the answer has 'rewards' twice"),
        ("other", "for other prompts"),
    ],
)
def test_a_broken_answer_is_a_status_for_every_response(
    path: str, said: str, server: Server, make_item: MakeItem
) -> None:
    scores = reward(server, path)([make_item(text) for text in ("a", "bb", "ccc")])
    assert {(score.value, score.status) for score in scores} == {(None, RewardStatus.FAILED)}
    assert said.lower() in scores[0].detail.lower() or path == "reset"
    assert len(server.requests) == 1, "only a network error is worth another try"


def test_numbers_that_are_none_fail_alone(server: Server, make_item: MakeItem) -> None:
    items = [make_item(text) for text in ("a", "bb", "ccc", "dddd")]
    assert [score.value for score in reward(server, "nan")(items)] == [None, 2.0, 3.0, 4.0]
    assert [score.value for score in reward(server, "words")(items)] == [None] * 4


@pytest.mark.parametrize(
    ("entry", "status", "detail"),
    [
        ({"reward": None, "status": "timeout", "detail": "no answer within 10 s"}, RewardStatus.TIMEOUT, "within 10 s"),
        ({"reward": None, "status": "ok"}, RewardStatus.FAILED, "the server answered"),
        ({"reward": None, "status": "splendid", "detail": "\x1b[2J"}, RewardStatus.FAILED, r"\x1b[2J"),
        (None, RewardStatus.FAILED, "the server answered None"),
        ({"parts": {"a": 1.0}}, RewardStatus.FAILED, "the server answered"),
        ({"reward": 1.0, "steps": 3}, RewardStatus.FAILED, "the server answered"),
        ({"reward": 1.0, "steps": [[1]]}, RewardStatus.FAILED, "the server answered"),
        ({"reward": 1.0, "steps": [[-1, 0.5]]}, RewardStatus.FAILED, "the server answered"),
        ({"reward": 1.0, "steps": [[1, None]]}, RewardStatus.FAILED, "the server answered"),
    ],
)
def test_the_reason_that_a_server_gives_for_no_score_is_kept(
    entry: object, status: RewardStatus, detail: str, server: Server, make_item: MakeItem
) -> None:
    server.entry = entry
    [score] = reward(server, "entry")([make_item("a")])
    assert (score.value, score.status) == (None, status)
    assert detail in score.detail


def test_steps_arrive(server: Server, make_item: MakeItem) -> None:
    server.entry = {"reward": 1.0, "steps": [[1, 0.5], [2, 1]]}
    [score] = reward(server, "entry")([make_item("ab")])
    assert score.steps == ((1, 0.5), (2, 1.0))


@pytest.mark.parametrize("path", ["hung", "drip"])
def test_a_server_that_never_ends_is_cut_off(path: str, server: Server, make_item: MakeItem) -> None:
    [score] = reward(server, path, seconds=0.3, retries=5)([make_item("a" * 2000)])
    assert (score.value, score.status) == (None, RewardStatus.TIMEOUT)
    assert "0.3 s" in score.detail
    assert len(server.requests) == 1, "what is late is not asked again"


def test_what_may_pass_is_tried_again_and_nothing_else_is(server: Server, make_item: MakeItem) -> None:
    [score] = reward(server, "once", retries=1)([make_item("abc")])
    assert score.value == 3.0
    assert len(server.requests) == 2
    reward(server, "reset", retries=2)([make_item("abc")])
    assert len(server.requests) == 2 + 3
    reward(server, "error", retries=2)([make_item("abc")])
    assert len(server.requests) == 2 + 3 + 3, "an error of the server's own code may pass"
    reward(server, "text", retries=2)([make_item("abc")])
    assert len(server.requests) == 2 + 3 + 3 + 1


def test_batches_wait_for_their_answers_at_once(server: Server, make_item: MakeItem) -> None:
    items = [make_item("x" * n) for n in range(1, 8)]
    scores = reward(server, "together", batch_size=2, concurrency=3)(items)
    assert [score.value for score in scores] == [float(n) for n in range(1, 8)]
    assert sorted(len(body["responses"]) for _, body, _ in server.requests) == [1, 2, 2, 2]
    assert server.most_at_once == 3


def test_a_request_holds_32_responses_where_nothing_is_said(server: Server, make_item: MakeItem) -> None:
    reward(server, "score")([make_item("x")] * 65)
    assert sorted(len(body["responses"]) for _, body, _ in server.requests) == [1, 32, 32]


def test_a_failing_batch_leaves_the_others_alone(server: Server, make_item: MakeItem) -> None:
    items = [make_item("x" * n) for n in (1, 2, 3)]
    scores = reward(server, "once", batch_size=1, concurrency=1)(items)
    assert [score.value for score in scores] == [None, 2.0, 3.0]


def test_a_server_that_is_not_there_is_found_before_the_run(server: Server) -> None:
    reward(server, "score").start()
    [(_, body, _)] = server.requests
    assert "images" not in body
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}/"
    slept: list[float] = []
    gone = RemoteReward("far", Endpoint(nobody, 20.0, 3, sleep=slept.append))
    with pytest.raises(ServiceError) as caught:
        gone.start()
    assert caught.value.problem.code == "reward.remote"
    assert slept == [0.1, 0.2, 0.4]


def test_a_token_of_the_environment_is_sent(
    server: Server, make_item: MakeItem, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward(server, "score")([make_item("a")])
    monkeypatch.setenv(TOKEN, "abc")
    reward(server, "score")([make_item("a")])
    assert [sent for _, _, sent in server.requests] == ["", "Bearer abc"]


@pytest.mark.parametrize("url", ["ftp://host/x", "host:80/x", "http:///x", "http://host:x/", "http://me:secret@host/x"])
def test_urls_that_cannot_be_asked_are_refused(url: str) -> None:
    with pytest.raises(OptionsError) as caught:
        checked_url(url, "--remote_rm_url")
    assert caught.value.problem.code == "reward.url"
    assert "secret" not in caught.value.problem.as_text()
    assert checked_url("https://host:9/x", "--remote_rm_url") == "https://host:9/x"


def test_an_answer_that_is_too_large_is_no_answer(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from rft_trainer.rewards.servers import http_client

    monkeypatch.setattr(http_client, "_LARGEST", 8)
    with pytest.raises(RequestFailure, match="larger"):
        Endpoint(f"{server.url}/score").post({"responses": ["abc"]})
