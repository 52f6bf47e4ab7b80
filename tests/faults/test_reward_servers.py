"""S1, S2, S3: reward servers that break off, answer garbage or go away; drawn faults, and none becomes a number."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from support.fault_counts import counted
from support.faulty_server import FaultyServer

from rft_core.errors import OutageError
from rft_trainer.records.scores import RewardItem, RewardStatus
from rft_trainer.rewards.servers.circuit_breaker import OPENS_AFTER, Backoff
from rft_trainer.rewards.servers.http_client import Endpoint, RequestFailure
from rft_trainer.rewards.servers.remote_reward_model import RemoteReward
from rft_trainer.rewards.servers.server_wait import ServerWait, WaitRules

SECONDS, SLACK = 0.3, 5.0
RETRIES = 2
MOST_MEMORY = 64 << 20
TRIES = {"reset": 1 + RETRIES, "500": 1 + RETRIES, "cut": 1 + RETRIES}
"""Of the faults that a second try may mend; of the others there is one."""
LATE = ("hang", "drip")
SERVER_FAULTS = (*("refused", "reset", "429", "500", "503", "504", "hang", "drip", "flood", "endless"), "cut", "page")


def items(rng: Random) -> list[RewardItem]:
    texts = ["x" * rng.randint(0, 40) for _ in range(rng.randint(1, 8))]
    return [RewardItem(f"p{n // 2}", "?", text, "2", "stop", 1) for n, text in enumerate(texts)]


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    made = FaultyServer()
    yield made
    made.close()


def closed_address() -> str:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{closed.getsockname()[1]}/"


@counted(len(SERVER_FAULTS), 2200)
def test_s1_a_server_that_breaks_off_floods_or_hangs(server: FaultyServer, number: int) -> None:
    """A status for every response within the request's time, in little memory; only what may pass is tried again."""
    ends = Counter[str]()
    longest = most = 0.0
    tracemalloc.start()
    for seed in range(number):
        rng = Random(f"s1 {seed}")
        fault = server.fault = SERVER_FAULTS[seed % len(SERVER_FAULTS)]
        seconds = SECONDS if fault in LATE else 20.0
        before, began = server.num_requests, time.monotonic()
        url = closed_address() if fault == "refused" else server.url
        asked = items(rng)
        tracemalloc.reset_peak()
        scores = RemoteReward("far", Endpoint(url, seconds, RETRIES, sleep=lambda _: None))(asked)
        most = max(most, tracemalloc.get_traced_memory()[1])
        took = time.monotonic() - began
        wanted = RewardStatus.TIMEOUT if fault in LATE else RewardStatus.FAILED
        assert {(score.value, score.status) for score in scores} == {(None, wanted)}, (seed, fault)
        assert len(scores) == len(asked)
        assert took < seconds + SLACK, (seed, fault, took)
        assert server.num_requests - before == (0 if fault == "refused" else TRIES.get(fault, 1)), (seed, fault)
        longest = max(longest, took - seconds) if fault in LATE else longest
        ends[f"{fault}: {wanted}"] += 1
    tracemalloc.stop()
    print(f"\nS1: {number}, {dict(ends)}; at most {longest:.2f} s after the time, {most / 2**20:.1f} MiB")
    assert most < MOST_MEMORY


def garbage(kind: str, rng: Random, request: dict[str, Any]) -> bytes:
    """An answer that is wrong in one way; the rest of it is as it should be."""
    number = len(request["responses"])
    rewards: list[Any] = [rng.random() for _ in range(number)]
    place = rng.randrange(number)
    bad = {
        "text": lambda: rng.choice(["1.0", "", "good", "NaN"]),
        "null": lambda: None,
        "bool": lambda: rng.random() < 0.5,
        "nan": lambda: math.nan,
        "infinity": lambda: rng.choice([math.inf, -math.inf]),
        "nested": lambda: rng.choice([[1.0], {"value": 1.0}, {"reward": [1.0]}, {"reward": {"reward": 1.0}}, [[]]]),
        "part": lambda: {"reward": 1.0, "parts": {"a": rng.choice([None, "1", math.nan, [1]])}},
        "huge": lambda: 10**400,
    }
    if kind in bad:
        rewards[place] = bad[kind]()
        return json.dumps({"rewards": rewards}).encode()
    body: dict[str, Any] = {"rewards": rewards}
    if kind == "count":
        body["rewards"] = rewards + rewards[: rng.randint(1, number)] if rng.random() < 0.5 else rewards[:-1]
    elif kind == "ids":
        body["rewards"] = dict(zip(request["prompt_ids"], rewards, strict=True))
    elif kind == "another batch":
        body["prompt_ids"] = [f"other{n}" for n in range(number)]
    elif kind == "shuffled":
        body["prompt_ids"] = [*request["prompt_ids"][1:], "p99"]
    text = json.dumps(body)
    if kind == "beyond":
        text = json.dumps({"rewards": [*rewards[:-1], 0]}).replace(", 0]", ", 1e999]").replace("[0]", "[1e999]")
    elif kind == "twice":
        text = f'{{"rewards": {json.dumps(rewards)}, "rewards": {json.dumps(rewards[::-1])}}}'
    elif kind == "twice inside":
        inside = ", ".join(['{"reward": 1.0, "reward": 0.0}'] * number)
        text = f'{{"rewards": [{inside}]}}'
    elif kind == "bytes":
        return bytes(rng.randrange(256) for _ in range(rng.randint(0, 200)))
    return text.encode()


VALUES = ("text", "null", "bool", "nan", "infinity", "nested", "part", "huge", "beyond")
"""One response is without a number; the others keep theirs."""
ANSWERS = ("count", "ids", "another batch", "shuffled", "twice", "twice inside", "bytes")
"""No response is scored."""


@counted(len(VALUES) + len(ANSWERS), 2000)
def test_s2_an_answer_that_is_garbage(server: FaultyServer, number: int) -> None:
    """What is no finite number of this request is a status, of its response alone or of all of them."""
    ends, kinds = Counter[str](), (*VALUES, *ANSWERS)
    for seed in range(number):
        rng, kind = Random(f"s2 {seed}"), kinds[seed % len(kinds)]
        server.body = lambda request, kind=kind, rng=rng: garbage(kind, rng, request)
        asked = items(rng)
        scores = RemoteReward("far", Endpoint(server.url, 20.0, 0))(asked)
        missing = [score for score in scores if score.value is None]
        assert len(scores) == len(asked), (seed, kind)
        assert len(missing) == (1 if kind in VALUES else len(asked)), (seed, kind, scores)
        assert {score.status for score in missing} == {RewardStatus.FAILED}, (seed, kind)
        ends[kind] += 1
    print(f"\nS2: {number}, {dict(ends)}: none was a number")


class Outage:
    """A server on a clock of its own: away in spells, slow in some answers; counts what it is asked while away."""

    def __init__(self, is_away: Callable[[float], bool], slow: float) -> None:
        self.now, self.asked_away, self.asked, self.away_seconds = 0.0, 0, 0, 0.0
        self._is_away, self._slow = is_away, slow
        self._lock = threading.Lock()

    def sleep(self, seconds: float) -> None:
        """Pass time, of which each of the threads takes its share."""
        with self._lock:
            self.away_seconds += seconds if self._is_away(self.now) else 0.0
            self.now += seconds
        time.sleep(0.0)

    def clock(self) -> float:
        return self.now

    def tried(self, body: bytes) -> Any:
        """One request: an answer, or what the client makes of a server that is away."""
        responses = json.loads(body)["responses"]
        with self._lock:
            self.asked += 1
            away = self._is_away(self.now)
            self.asked_away += away
            self.now += 0.05 + (self._slow if self.asked % 2 else 0.0)
        if away:
            raise RequestFailure(RewardStatus.FAILED, "HTTP 503", is_away=True)
        return {"rewards": [float(len(text)) for text in responses]}


@counted(6, 300)
def test_s3_a_server_that_is_away_for_a_second_or_an_hour(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are those of a server that was there; few requests meanwhile; after the time that it waits, no score."""
    ends = Counter[str]()
    most = 0.0
    for seed in range(number):
        rng = Random(f"s3 {seed}")
        kind = ("once", "flapping", "slow half")[seed % 3]
        length, wait, begins = math.exp(rng.uniform(0.0, math.log(3600.0))), rng.choice([600.0, 7200.0]), rng.random()
        periods: dict[str, Callable[[float], bool]] = {
            "once": lambda now, begins=begins, length=length: begins <= now < begins + length,
            "flapping": lambda now, length=length: now < length and int(now * 10) % 2 == 0,
            "slow half": lambda _: False,
        }
        outage = Outage(periods[kind], 3.0 if kind == "slow half" else 0.0)
        monkeypatch.setattr(Endpoint, "_tried", lambda _, body, outage=outage: outage.tried(body))
        rules = WaitRules(wait, clock=outage.clock, sleep=outage.sleep, backoff=Backoff(rng.random))
        waiting = ServerWait("far", "http://far", rules)
        reward = RemoteReward("far", Endpoint("http://far/", wait=waiting), batch_size=1, concurrency=rng.randint(1, 4))
        asked = [RewardItem("p", "?", "x" * rng.randint(0, 9), "2", "stop", 1) for _ in range(40)]
        try:
            scores = reward(asked)
        except OutageError:
            assert kind == "once", (seed, kind)
            assert length > wait, (seed, length)
            ends["ended after its time"] += 1
            continue
        assert [score.value for score in scores] == [float(len(item.response_text)) for item in asked], (seed, kind)
        # a server that answers in 0.05 s is asked 20 times a second by each thread
        if outage.away_seconds > 1.0 and kind == "once":
            rate = max(0.0, outage.asked_away - OPENS_AFTER - 4) / outage.away_seconds
            most = max(most, rate)
            assert rate <= 1.2, (seed, rate)
        ends[f"{kind}: scored"] += 1
    print(f"\nS3: {number}, {dict(ends)}; while away at most {most:.2f} requests a second, beside 20 in service")
