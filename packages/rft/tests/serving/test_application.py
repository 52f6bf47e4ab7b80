"""The web application of a reward server: codes, limits, token, and the caller's host."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from starlette.testclient import TestClient

from rft.serving.application import ApplicationOptions, make_application
from rft.serving.scoring_queue import ScoringQueue
from rft_core.errors import OutageError
from rft_trainer.records.scores import RewardItem, RewardStatus, Score


class Lengths:
    """Gives each response its length; some words ask for trouble."""

    def __init__(self) -> None:
        self.began, self.may_go = threading.Event(), threading.Event()

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        words = [item.response_text for item in items]
        if "wait" in words:
            self.began.set()
            assert self.may_go.wait(20)
        if "raise" in words:
            raise ValueError("it went wrong")
        if "outage" in words:
            raise OutageError(code="x", what="the judge is away", where="--judge_url", why="", do="wait")
        return [Score(None, RewardStatus.FAILED, detail="odd") if w == "none" else Score(len(w)) for w in words]

    def close(self) -> None:
        self.may_go.set()


@pytest.fixture
def reward() -> Lengths:
    return Lengths()


@pytest.fixture
def queue(reward: Lengths) -> Iterator[ScoringQueue]:
    made = ScoringQueue(reward, most_waiting=1)
    yield made
    reward.may_go.set()
    made.close()


def client_of(queue: ScoringQueue, **options: Any) -> TestClient:
    chosen = ApplicationOptions(
        **{"names": ["lengths"], "max_bytes": 1000, "max_responses": 5, "read_seconds": 5.0, **options}
    )
    return TestClient(make_application(queue, chosen), base_url="http://127.0.0.1", raise_server_exceptions=False)


def test_scores_reasons_and_figures(queue: ScoringQueue) -> None:
    client = client_of(queue)
    answer = client.post("/score", json={"responses": ["abc", "none"]})
    assert answer.status_code == 200
    assert answer.json()["rewards"] == [
        {"reward": 3, "parts": {}},
        {"reward": None, "status": "failed", "detail": "odd"},
    ]
    assert client.post("/get_reward", json={"query": ["ab"], "prompts": ["a"]}).json()["rewards"][0]["reward"] == 1
    assert client.post("/score", json={"responses": []}).json() == {"rewards": []}
    health = client.get("/health").json()
    assert {name: health[name] for name in ("status", "rewards", "requests", "responses", "unscored", "waiting")} == {
        "status": "ready",
        "rewards": ["lengths"],
        "requests": 2,
        "responses": 3,
        "unscored": 1,
        "waiting": 0,
    }
    assert "POST /score" in client.get("/").text
    assert client.get("/docs").status_code == 404


@pytest.mark.parametrize(
    ("sent", "code", "said"),
    [
        ({"content": b"{}", "headers": {"Content-Type": "text/plain"}}, 415, "application/json is expected"),
        ({"json": {"responses": [1]}}, 400, "responses[0]"),
        ({"json": {"responses": ["x"] * 6}}, 413, "6 responses"),
        ({"json": {"responses": ["x" * 1000]}}, 413, "1000 bytes"),
        ({"json": {"responses": ["raise"]}}, 500, "ValueError"),
        ({"json": {"responses": ["outage"]}}, 503, "the judge is away"),
        ({"json": {"responses": ["x"]}, "headers": {"Host": "evil.example"}}, 403, "evil.example"),
    ],
)
def test_refusals_have_a_code_and_a_reason(sent: dict[str, Any], code: int, said: str, queue: ScoringQueue) -> None:
    answer = client_of(queue).post("/score", **sent)
    assert answer.status_code == code
    assert said in answer.json()["error"]
    assert ("retry-after" in answer.headers) == (code == 503)


def test_a_body_of_unstated_length_is_cut_at_the_limit(queue: ScoringQueue) -> None:
    read: list[int] = []

    def endless() -> Iterator[bytes]:
        for number in range(100_000):
            read.append(number)
            yield b" " * 100

    headers = {"Content-Type": "application/json"}
    answer = client_of(queue).post("/score", content=endless(), headers=headers)
    assert answer.status_code == 413


def test_a_token_is_asked_for_where_there_is_one(queue: ScoringQueue) -> None:
    client = client_of(queue, token="s3cret", host="0.0.0.0")
    body = {"responses": ["abc"]}
    assert client.post("/score", json=body).status_code == 401
    assert client.post("/score", json=body, headers={"Authorization": "Bearer s3cre"}).status_code == 401
    assert client.post("/score", json=body, headers={"Authorization": "Bearer s3cret"}).status_code == 200
    assert client.get("/health").status_code == 200


def test_a_queue_that_is_full_says_come_back(queue: ScoringQueue, reward: Lengths) -> None:
    client = client_of(queue)
    waiting = RewardItem("p", "", "wait", None, "stop", 1)
    first = queue.add([waiting])
    assert reward.began.wait(20)
    second = queue.add([waiting])
    answer = client.post("/score", json={"responses": ["x"]})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    reward.may_go.set()
    assert first.result(20)[0].value == second.result(20)[0].value == 4


def test_a_server_that_is_closing_says_so(queue: ScoringQueue) -> None:
    client = client_of(queue)
    queue.close()
    assert client.get("/health").status_code == 503
    assert client.post("/score", json={"responses": ["x"]}).status_code == 503


def test_a_request_that_is_sent_again_changes_nothing(queue: ScoringQueue) -> None:
    """Whoever records a request with its token can have the same answer again, and nothing else."""
    client = client_of(queue, token="first-token", host="0.0.0.0")
    recorded = {
        "content": b'{"responses": ["abc", "none"], "prompts": ["p", "p"]}',
        "headers": {"Content-Type": "application/json", "Authorization": "Bearer first-token"},
    }
    answers = [client.post("/score", **recorded) for _ in range(20)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    health = client.get("/health").json()
    assert (health["requests"], health["failures"], health["waiting"]) == (20, 0, 0)
    started_again = client_of(queue, token="second-token", host="0.0.0.0")
    assert started_again.post("/score", **recorded).status_code == 401, "a token is that of one start"


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer first-toke"},
        {"Authorization": "Bearer first-token "},
        {"Authorization": "bearer first-token"},
        {"Authorization": "first-token"},
        {"Authorization": "Basic Zmlyc3QtdG9rZW4="},
        {"Authorization": "Bearer  first-token"},
        {"Authorization": "Bearer first-token, Bearer first-token"},
        {"X-Authorization": "Bearer first-token"},
        {"Cookie": "token=first-token"},
        {},
    ],
    ids=str,
)
def test_a_token_that_is_forged_is_refused(queue: ScoringQueue, headers: dict[str, str]) -> None:
    client = client_of(queue, token="first-token", host="0.0.0.0")
    answer = client.post("/score?token=first-token", json={"responses": ["abc"]}, headers=headers)
    assert (answer.status_code, client.get("/health").json()["requests"]) == (401, 0)
