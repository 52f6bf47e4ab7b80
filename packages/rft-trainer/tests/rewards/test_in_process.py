from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rft_core.errors import OptionsError
from rft_trainer.records.scores import RewardItem, RewardStatus
from rft_trainer.rewards.in_process import IN_PROCESS, FunctionReward
from rft_trainer.rewards.registry import reward_by_name

MakeItem = Callable[..., RewardItem]


def test_all_responses_of_a_prompt_are_scored_in_one_call(make_item: MakeItem) -> None:
    calls: list[tuple[list[str], list[str | None]]] = []

    def reward_fn(responses: list[str], labels: list[str | None]) -> list[float]:
        calls.append((responses, labels))
        return [float(response == label) for response, label in zip(responses, labels, strict=True)]

    items = [make_item("18", prompt_id="a"), make_item("17", prompt_id="a"), make_item("x", None, prompt_id="b")]
    assert [score.value for score in FunctionReward(reward_fn)(items)] == [1.0, 0.0, 0.0]
    assert calls == [(["18", "17"], ["18", "18"]), (["x"], [None])]


def test_extras_are_filled_in_by_name(make_item: MakeItem) -> None:
    def reward_fn(responses: Any, labels: Any, *, prompts: Any, finish_reasons: Any, num_tokens: Any) -> list[float]:
        assert prompts == ["7+11="]
        assert finish_reasons == ["length"]
        return [float(num_tokens[0])]

    assert FunctionReward(reward_fn)([make_item("123", prompt="7+11=", finish_reason="length")])[0].value == 3.0


@pytest.mark.parametrize("make", [lambda v: v, tuple, lambda v: torch.tensor(v, dtype=torch.float64)])
def test_lists_tuples_and_tensors_are_numbers(make: Callable[[list[float]], Any], make_item: MakeItem) -> None:
    reward = FunctionReward(lambda responses, labels: make([0.25, 1.0]))
    assert [score.value for score in reward([make_item("x")] * 2)] == [0.25, 1.0]


def test_what_is_no_finite_number_is_no_score(make_item: MakeItem) -> None:
    reward = FunctionReward(lambda responses, labels: [1.0, None, float("nan"), "high"])
    scores = reward([make_item("x")] * 4)
    assert [score.value for score in scores] == [1.0, None, None, None]
    assert [score.status for score in scores[1:]] == [RewardStatus.FAILED] * 3
    assert "'nan'" in scores[2].detail


def test_parts_and_steps_are_taken(make_item: MakeItem) -> None:
    told = {"reward": 0.9, "parts": {"correctness": 1.0}, "steps": [(1, 0.5)]}
    (score,) = FunctionReward(lambda responses, labels: [told])([make_item("x")])
    assert (score.value, dict(score.breakdown), score.steps) == (0.9, {"correctness": 1.0}, ((1, 0.5),))


def test_what_it_raises_is_raised_with_the_prompt_named(make_item: MakeItem) -> None:
    def broken(responses: list[str], labels: list[str]) -> list[float]:
        raise KeyError(responses[0])

    with pytest.raises(KeyError, match="x") as caught:
        FunctionReward(broken)([make_item("x", prompt_id="train.jsonl:3")])
    (note,) = caught.value.__notes__
    assert note.startswith("in the reward function test_what_it_raises")
    assert note.endswith("broken, called with the responses to train.jsonl:3")


def test_a_wrong_number_of_values_is_an_error_of_the_function(make_item: MakeItem) -> None:
    with pytest.raises(ValueError, match="returned 1 values for 2 responses"):
        FunctionReward(lambda responses, labels: [1.0])([make_item("x")] * 2)


class Judge:
    """A callable object."""

    def __call__(self, responses: list[str], labels: list[str]) -> list[float]:
        return [2.0] * len(responses)

    def method(self, responses: list[str], labels: list[str]) -> list[float]:
        return [3.0] * len(responses)


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        (Judge(), "Judge", 2.0),
        (Judge().method, "Judge.method", 3.0),
        (functools.partial(lambda extra, responses, labels: [extra] * len(responses), 4.0), "partial", 4.0),
    ],
)
def test_any_callable_will_do(function: Any, name: str, value: float, make_item: MakeItem) -> None:
    reward = FunctionReward(function)
    assert reward.name == name
    assert reward([make_item("x")])[0].value == value
    reward.close()


def test_a_signature_that_cannot_be_called_is_refused_with_the_file() -> None:
    def reward_fn(prompts: str) -> float:
        return 1.0

    with pytest.raises(OptionsError, match=r"def .*reward_fn\(prompts: 'str'\)") as caught:
        FunctionReward(reward_fn)
    assert caught.value.problem.code == "reward.signature"
    assert caught.value.problem.where == f"{__file__}:{reward_fn.__code__.co_firstlineno}"


def test_columns_are_bound_when_the_data_are_known(make_item: MakeItem) -> None:
    def reward_fn(response: str, level: int) -> float:
        return float(level)

    reward = FunctionReward(reward_fn)
    reward.bind_columns({"level": ""})
    assert reward([replace(make_item("x"), columns={"level": 3})])[0].value == 3.0
    with pytest.raises(OptionsError, match="level") as caught:
        reward.bind_columns({"word": ""})
    assert caught.value.problem.code == "reward.signature"


def test_its_name_in_a_file_of_settings_is_refused_by_a_command() -> None:
    with pytest.raises(OptionsError, match="the reward custom_reward_fn was a function of the script") as caught:
        reward_by_name(f"{IN_PROCESS}custom_reward_fn")
    assert caught.value.problem.code == "reward.in_process"
