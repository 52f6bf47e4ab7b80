"""A judge behind a server, by a double of the endpoint: the body of a request, and how many are sent at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rft_core.errors import ServiceError
from rft_trainer.records.scores import RewardStatus, Score
from rft_trainer.rewards.images import data_uri, probe_image
from rft_trainer.rewards.servers.http_client import RequestFailure
from rft_trainer.rewards.servers.remote_judge import RemoteJudge


class FakeEndpoint:
    """Answers every body by a function."""

    url = "http://host/x"

    def __init__(self, answer: Callable[[dict[str, Any]], Any]) -> None:
        self._answer, self.bodies = answer, list[dict[str, Any]]()
        self.probes, self.waits = list[dict[str, Any]](), list[bool]()

    def post(self, body: dict[str, Any], probe: dict[str, Any], *, waits: bool = True) -> Any:
        self.bodies.append(body)
        self.probes.append(probe)
        self.waits.append(waits)
        return self._answer(body)


def says(text: object) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}}, {"message": {"content": "another"}}]}


def judge(answer: Callable[[dict[str, Any]], Any], **options: Any) -> tuple[RemoteJudge, FakeEndpoint]:
    endpoint: Any = FakeEndpoint(answer)
    return RemoteJudge(endpoint, "big", max_new_tokens=9, **options), endpoint


def body(content: object, seed: int) -> dict[str, Any]:
    return {
        "model": "big",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 9,
        "seed": seed,
    }


def test_every_question_is_a_request_with_the_low_bits_of_its_key() -> None:
    asks, endpoint = judge(lambda sent: says(sent["messages"][0]["content"].upper()), concurrency=1)
    keys = [5, 2**31 + 6, 2**63 - 1]
    assert asks.ask(["a", "b", "c"], keys) == ["A", "B", "C"]
    assert endpoint.bodies == [body("a", 5), body("b", 6), body("c", 2**31 - 1)]
    assert endpoint.probes == [body("Say yes.", 0)] * 3
    assert endpoint.waits == [True] * 3


def test_the_start_asks_one_question_with_and_without_an_image() -> None:
    asks, endpoint = judge(lambda sent: says("yes"))
    asks.start()
    asks.start(with_image=True)
    first, second = endpoint.bodies
    assert endpoint.waits == [False, False], "a wrong address shows itself at once"
    assert (first["seed"], second["seed"]) == (0, 0)
    assert isinstance(first["messages"][0]["content"], str)
    assert second["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": data_uri(probe_image())}},
        {"type": "text", "text": first["messages"][0]["content"]},
    ]


@pytest.mark.parametrize(
    "answer", [{}, {"choices": []}, {"choices": [{}]}, {"choices": [{"message": None}]}, says(None), says(3), [], "x"]
)
def test_an_answer_without_a_text_is_a_failure_and_found_at_the_start(answer: Any) -> None:
    asks, _ = judge(lambda sent: answer)
    [score] = asks.ask(["a"], [1])
    assert isinstance(score, Score)
    assert (score.value, score.status, bool(score.detail)) == (None, RewardStatus.FAILED, True)
    for with_image in (False, True):
        with pytest.raises(ServiceError) as caught:
            asks.start(with_image=with_image)
        assert caught.value.problem.code == "reward.judge"


def test_a_request_that_fails_gives_its_status_and_its_reason() -> None:
    def fails(sent: dict[str, Any]) -> Any:
        raise RequestFailure(RewardStatus.TIMEOUT, "late")

    asks, _ = judge(fails)
    assert asks.ask(["a"], [1]) == [Score(None, RewardStatus.TIMEOUT, detail="late")]


def test_no_more_requests_are_under_way_than_allowed_or_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []

    class Pool:
        def __init__(self, num: int, name: str) -> None:
            numbers.append(num)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        map = staticmethod(map)

    monkeypatch.setattr("rft_trainer.rewards.servers.remote_judge.ThreadPoolExecutor", Pool)
    few, _ = judge(lambda sent: says("x"), concurrency=3)
    many, _ = judge(lambda sent: says("x"))
    for asks, num in ((few, 0), (few, 2), (few, 5), (many, 20)):
        assert asks.ask(["q"] * num, range(num)) == ["x"] * num
    assert numbers == [1, 2, 3, 8]
