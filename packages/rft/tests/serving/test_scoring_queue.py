"""The queue before a reward: order, limits, calls of several requests, and what a failure leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future

import pytest

from rft.serving.scoring_queue import QueueFull, ScoringQueue
from rft_core.errors import ServiceError
from rft_trainer.records.scores import RewardItem, Score


class Lengths:
    """Gives each response its length; waits before the first call until it may begin."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.began, self.may_go = threading.Event(), threading.Event()
        self.is_closed = False

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        self.began.set()
        assert self.may_go.wait(20)
        self.calls.append([item.response_text for item in items])
        if self.calls[-1] == ["raise"]:
            raise ValueError("no such text")
        return [Score(float(len(item.response_text))) for item in items]

    def close(self) -> None:
        self.is_closed = True


def items(*texts: str) -> list[RewardItem]:
    return [RewardItem("p", "", text, None, "stop", 1) for text in texts]


MakeQueue = Callable[..., ScoringQueue]


@pytest.fixture
def reward() -> Lengths:
    return Lengths()


@pytest.fixture
def make(reward: Lengths) -> Iterator[MakeQueue]:
    made: list[ScoringQueue] = []

    def queue(**options: int) -> ScoringQueue:
        made.append(ScoringQueue(reward, **{"most_waiting": 8, **options}))
        return made[-1]

    yield queue
    reward.may_go.set()
    for one in made:
        one.close()


def held(queue: ScoringQueue, reward: Lengths, *requests: Sequence[str]) -> list[Future[list[Score]]]:
    """Requests that wait while the first one is being scored, then go."""
    first = queue.add(items("first"))
    assert reward.began.wait(20)
    futures = [queue.add(items(*texts)) for texts in requests]
    reward.may_go.set()
    assert [score.value for score in first.result(20)] == [5.0]
    return futures


def values(future: Future[list[Score]]) -> list[float | None]:
    return [score.value for score in future.result(20)]


def test_each_request_is_a_call_and_gets_its_own_scores(make: MakeQueue, reward: Lengths) -> None:
    one, two = held(make(), reward, ["a", "bb"], ["ccc"])
    assert (values(one), values(two)) == ([1.0, 2.0], [3.0])
    assert reward.calls == [["first"], ["a", "bb"], ["ccc"]]


def test_waiting_requests_share_a_call_up_to_its_size(make: MakeQueue, reward: Lengths) -> None:
    futures = held(make(batch_size=3), reward, ["a", "bb"], ["ccc"], ["dddd"], ["e"] * 5)
    assert [values(future) for future in futures] == [[1.0, 2.0], [3.0], [4.0], [1.0] * 5]
    assert reward.calls[1:] == [["a", "bb", "ccc"], ["dddd"], ["e"] * 5], "a request is never cut"


def test_a_call_that_raises_is_the_failure_of_its_requests_alone(make: MakeQueue, reward: Lengths) -> None:
    queue = make()
    bad, good = held(queue, reward, ["raise"], ["ok"])
    assert isinstance(bad.exception(20), ValueError)
    assert values(good) == [2.0]
    figures = queue.counters
    assert (figures.requests, figures.responses, figures.failures) == (2, 2, 1)
    assert "no such text" in figures.last_failure


def test_more_requests_than_may_wait_are_refused_and_cancelled_ones_do_not_count(
    make: MakeQueue, reward: Lengths
) -> None:
    queue = make(most_waiting=1)
    queue.add(items("first"))
    assert reward.began.wait(20)
    gone = queue.add(items("gone"))
    with pytest.raises(QueueFull):
        queue.add(items("x"))
    gone.cancel()
    kept = queue.add(items("kept"))
    reward.may_go.set()
    assert values(kept) == [4.0]
    assert reward.calls == [["first"], ["kept"]]


def test_closing_cancels_what_waits_and_closes_the_reward(make: MakeQueue, reward: Lengths) -> None:
    queue = make()
    first = queue.add(items("first"))
    assert reward.began.wait(20)
    waiting = queue.add(items("late"))
    closing = threading.Thread(target=queue.close)
    closing.start()
    with pytest.raises(CancelledError):
        waiting.result(20)
    reward.may_go.set()
    closing.join(20)
    assert values(first) == [5.0]
    assert reward.is_closed
    assert not queue.is_alive
    with pytest.raises(ServiceError):
        queue.add(items("x"))
