"""Scores of models as rewards: weights of heads, what is missing, and several rewards as one."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from rft_core.errors import OptionsError
from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards.combined import CombinedReward, RewardComponent
from rft_trainer.rewards.exact import ExactReward
from rft_trainer.rewards.reward_model import ModelReward

MakeItem = Callable[..., RewardItem]


@dataclass(slots=True)
class Lengths:
    """Scores a response by its length (and its negative); "?" has no score, "!" one that is not finite."""

    heads: tuple[str, ...] = ("long",)
    asked: list[Any] = field(default_factory=list[Any])

    def score(
        self, prompts: Sequence[str], messages: Sequence[Sequence[Mapping[str, Any]]], responses: Sequence[str]
    ) -> list[Mapping[str, float] | str]:
        self.asked.append((list(prompts), list(messages), list(responses)))
        return [self._one(response) for response in responses]

    def _one(self, response: str) -> Mapping[str, float] | str:
        if response == "?":
            return "cannot be read"
        length = math.inf if response == "!" else float(len(response))
        return {head: length * sign for head, sign in zip(self.heads, (1.0, -1.0), strict=False)}


@dataclass(slots=True)
class Fixed:
    """The same score for every response."""

    given: Score
    closed: int = 0

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        return [self.given] * len(items)

    def close(self) -> None:
        self.closed += 1


def test_heads_are_parts_and_their_weighted_sum_is_the_reward(make_item: MakeItem) -> None:
    items = [make_item("abc"), make_item("?"), make_item("!"), make_item("")]
    one = ModelReward("rm", Lengths(), {"long": 2.0})
    assert [score.value for score in one(items)] == [6.0, None, None, 0.0]
    assert one(items)[0].breakdown == {"rm": 3.0}
    two = ModelReward("rm", Lengths(("long", "short")), {"long": 1.0, "short": 0.25})
    [score] = two(items[:1])
    assert (score.value, score.breakdown) == (3.0 - 0.75, {"rm/long": 3.0, "rm/short": -3.0})
    assert two.parts == ("rm/long", "rm/short")
    unread, infinite = one(items)[1:3]
    assert (unread.status, unread.detail) == (RewardStatus.FAILED, "cannot be read")
    assert infinite.status is RewardStatus.FAILED


def test_texts_and_conversations_reach_the_model_and_it_is_visited_once_a_call() -> None:
    turns = ({"role": "user", "content": "q"},)
    visits: list[str] = []

    @contextmanager
    def phase() -> Generator[None]:
        visits.append("in")
        yield
        visits.append("out")

    model = Lengths()
    reward = ModelReward("rm", model, {"long": 1.0}, phase=phase)
    reward([RewardItem("p", "rendered q", "a", None, "stop", 1, turns), RewardItem("p", "x", "b", None, "stop", 1)])
    assert model.asked == [(["rendered q", "x"], [turns, ()], ["a", "b"])]
    assert visits == ["in", "out"]
    assert reward([]) == []
    assert visits == ["in", "out"]


def test_parts_are_added_up_and_told(make_item: MakeItem) -> None:
    parts = [
        RewardComponent("exact", ExactReward()),
        RewardComponent("rm", ModelReward("rm", Lengths(), {"long": 0.5})),
    ]
    right, wrong = CombinedReward(parts)([make_item("18", "18"), make_item("180", "18")])
    assert (right.value, right.breakdown) == (1.0 + 1.0, {"correctness": 1.0, "rm": 2.0})
    assert (wrong.value, wrong.breakdown) == (1.5, {"correctness": 0.0, "rm": 3.0})


def test_weights_are_over_all_parts_by_name(make_item: MakeItem) -> None:
    parts = [
        RewardComponent("exact", ExactReward()),
        RewardComponent("rm", ModelReward("rm", Lengths(("long", "short")), {"long": 1.0, "short": 1.0})),
        RewardComponent("flat", Fixed(Score(4.0))),
    ]
    combined = CombinedReward(parts, {"correctness": 10.0, "rm/short": 0.5, "flat": 0.25})
    [score] = combined([make_item("18", "18")])
    assert score.value == 10.0 - 1.0 + 1.0
    assert score.breakdown == {"correctness": 1.0, "rm/long": 2.0, "rm/short": -2.0, "flat": 4.0}
    with pytest.raises(OptionsError) as caught:
        CombinedReward(parts, {"corectness": 1.0})([make_item("18", "18")])
    assert caught.value.problem.code == "reward.unknown_part"


def test_a_sum_without_a_part_is_no_reward(make_item: MakeItem) -> None:
    late = Score(None, RewardStatus.TIMEOUT, detail="no answer")
    parts = [RewardComponent("exact", ExactReward()), RewardComponent("far", Fixed(late), waits=True)]
    [score] = CombinedReward(parts)([make_item("18", "18")])
    assert (score.value, score.status, score.detail) == (None, RewardStatus.TIMEOUT, "far: no answer")
    assert score.breakdown == {"correctness": 1.0}


def test_steps_of_the_function_are_kept(make_item: MakeItem) -> None:
    steps = ((2, 0.5), (4, 1.0))
    parts = [
        RewardComponent("f", Fixed(Score(1.0, steps=steps))),
        RewardComponent("rm", ModelReward("rm", Lengths(), {"long": 1.0})),
    ]
    [score] = CombinedReward(parts)([make_item("abcd")])
    assert (score.value, score.steps) == (5.0, steps)


def test_what_waits_runs_beside_the_rest(make_item: MakeItem) -> None:
    """Each waits for the other to have begun: one after the other, neither would end."""
    meeting = threading.Barrier(3, timeout=20)

    @dataclass(slots=True)
    class Meets:
        value: float

        def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
            meeting.wait()
            return [Score(self.value)] * len(items)

        def close(self) -> None:
            pass

    parts = [
        RewardComponent("a", Meets(1.0), waits=True),
        RewardComponent("b", Meets(2.0)),
        RewardComponent("c", Meets(4.0), waits=True),
    ]
    assert [score.value for score in CombinedReward(parts)([make_item("x")] * 2)] == [7.0, 7.0]


def test_closing_closes_every_part() -> None:
    rewards = [Fixed(Score(1.0)), Fixed(Score(2.0))]
    CombinedReward([RewardComponent("a", rewards[0]), RewardComponent("b", rewards[1])]).close()
    assert [reward.closed for reward in rewards] == [1, 1]


def test_no_responses_have_no_scores() -> None:
    assert (
        CombinedReward(
            [RewardComponent("a", Fixed(Score(1.0))), RewardComponent("b", Fixed(Score(1.0)), waits=True)], {"a": 1.0}
        )([])
        == []
    )
