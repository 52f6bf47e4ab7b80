"""Calls of a user's function by a double of its processes: what is sent, how long it may take, what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import OptionsError
from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards import math, user_function
from rft_trainer.rewards.registry import reward_by_name
from rft_trainer.rewards.user_function import FileReward
from rft_trainer.workers.limits import ProcessLimits
from rft_trainer.workers.pool import Job, Outcome

MakeItem = Callable[..., RewardItem]
WriteReward = Callable[[str], Path]


class Pool:
    """Notes its calls; the outcomes are those of the test."""

    made: list[Pool]
    outcomes: list[Outcome]

    def __init__(self, name: str, **options: Any) -> None:
        assert callable(options.pop("output"))
        self.name, self.options, self.log = name, options, list[Any]()
        arguments = [{"name": each, "kind": "either", "required": True} for each in ("responses", "labels")]
        facts = {"name": "f", "written": "def f(responses, labels)", "place": "my.py:1", "arguments": arguments}
        self.about = {"function": facts}
        self.made.append(self)

    def start(self) -> None:
        self.log.append("start")

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        self.log.append(list(jobs))
        return [self.outcomes.pop(0) for _ in jobs]

    def close(self) -> None:
        self.log.append("close")


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[Pool]:
    Pool.made, Pool.outcomes = [], []
    monkeypatch.setattr(user_function, "WorkerPool", Pool)
    return Pool.made


def test_a_prompt_is_one_call_with_time_for_each_of_its_responses(pools: list[Pool], make_item: MakeItem) -> None:
    items = [
        RewardItem("a", "1+1", "2", "2", "stop", 1),
        RewardItem("a", "1+1", "3", "2", "length", 4),
        RewardItem("b", "2+2", "4", None, "stop", 2),
    ]
    Pool.outcomes = [
        Outcome(RewardStatus.OK, [0.5, {"reward": 1.0, "parts": {"form": 0.25}, "steps": [[1, 0.5], [3, 2]]}]),
        Outcome(RewardStatus.TIMEOUT, detail="late"),
    ]
    reward = FileReward("my.py", "f", timeout=2.5)
    assert reward(items) == [
        Score(0.5),
        Score(1.0, breakdown={"form": 0.25}, steps=((1, 0.5), (3, 2.0))),
        Score(None, RewardStatus.TIMEOUT, detail="late"),
    ]
    [pool] = pools
    assert pool.log[0] == "start", "a file that cannot be used is refused before the run"
    first, second = pool.log[1]
    assert (first.seconds, second.seconds) == (5.0, 2.5)
    assert first.payload == {
        "num_responses": 2,
        "one_at_a_time": False,
        "num_positional": 0,
        "order": ["responses", "labels"],
        "lists": {"responses": ["2", "3"]},
        "shared": {"labels": "2"},
    }, "what the function takes, and nothing else"
    assert second.payload["shared"] == {"responses": "4", "labels": None}
    reward.close()
    assert pool.log[2:] == ["close"]


def test_a_failure_in_place_of_a_number_is_why_there_is_none(
    pools: list[Pool], make_item: MakeItem, caplog: pytest.LogCaptureFixture
) -> None:
    failure = {"failure": "exception", "detail": "ValueError: x", "place": "my.py:3", "traceback": "Traceback ..."}
    Pool.outcomes = [Outcome(RewardStatus.OK, [failure, 2.0])]
    scores = FileReward("my.py", "f")([make_item("a"), make_item("b")])
    detail = "ValueError: x (my.py:3)"
    assert scores == [Score(None, RewardStatus.FAILED, detail=detail, failure="exception"), Score(2.0)]
    assert caplog.records[0].getMessage().endswith(f"{detail}\nTraceback ...")


def test_a_call_that_failed_has_kind_and_place_in_every_response(pools: list[Pool], make_item: MakeItem) -> None:
    Pool.outcomes = [Outcome(RewardStatus.FAILED, detail="KeyError: 3", location="my.py:9", failure="exception")]
    scores = FileReward("my.py", "f")([make_item("a"), make_item("b")])
    assert {(score.detail, score.failure) for score in scores} == {("KeyError: 3 (my.py:9)", "exception")}


def test_a_function_whose_arguments_cannot_be_bound_leaves_no_process(
    pools: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_function, "bind", lambda facts, columns: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        FileReward("my.py", "f")
    assert pools[0].log == ["start", "close"]


def test_a_file_has_one_process_and_ten_seconds_where_nothing_is_said(pools: list[Pool], make_item: MakeItem) -> None:
    Pool.outcomes = [Outcome(RewardStatus.OK, [1.0])] * 3
    limits = ProcessLimits(data_bytes=7)
    rewards = [FileReward("my.py", "f"), reward_by_name("a:b.py:f")]
    rewards.append(reward_by_name("m.py:f", num_workers=3, timeout=4, limits=limits))
    for reward in rewards:
        reward([make_item("a")])
    assert [pool.options for pool in pools] == [
        {"num_workers": 1, "limits": None},
        {"num_workers": 1, "limits": None},
        {"num_workers": 3, "limits": limits},
    ]
    assert [pool.log[1][0].seconds for pool in pools] == [10.0, 10.0, 4.0]
    assert len({pool.name for pool in pools}) == 3


@pytest.mark.parametrize("name", ["math", "gsm8k"])
def test_processes_and_seconds_reach_the_rewards_that_use_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    for kind in ("MathReward", "Gsm8kReward"):
        monkeypatch.setattr(math, kind, lambda kind=kind, **options: made.append((kind, options)))
    reward_by_name(name)
    reward_by_name(name, num_workers=3, timeout=4.0)
    kind = {"math": "MathReward", "gsm8k": "Gsm8kReward"}[name]
    assert made == [(kind, {"num_workers": 1, "timeout": 10.0}), (kind, {"num_workers": 3, "timeout": 4.0})]


@pytest.mark.parametrize("name", [":f", "my.py:", "my.py", ":", "in-process:f"])
def test_a_name_without_a_file_or_without_a_function_is_refused(name: str, pools: list[Pool]) -> None:
    with pytest.raises(OptionsError) as caught:
        reward_by_name(name)
    assert caught.value.problem.code == ("reward.in_process" if name.startswith("in-") else "reward.unknown")
    assert pools == []
