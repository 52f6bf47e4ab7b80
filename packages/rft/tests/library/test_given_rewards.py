"""Rewards as objects: names, one function, and several that are parts under their own names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rft.library.given_rewards import FunctionRewards, chosen_reward, refuse_weights_in_order
from rft_core.errors import OptionsError
from rft_trainer.records.scores import RewardItem
from rft_trainer.rewards.combined import RewardComponent
from rft_trainer.rewards.exact import ExactReward


def right(responses: Sequence[str], labels: Sequence[str]) -> list[float]:
    return [float(response == label) for response, label in zip(responses, labels, strict=True)]


def short(completions: Sequence[str]) -> list[float]:
    return [1.0 / len(text) for text in completions]


def item(response: str, label: str) -> RewardItem:
    return RewardItem(
        prompt_id="a:0", prompt_text="?", response_text=response, label=label, finish_reason="stop", num_tokens=1
    )


class ClosedReward(ExactReward):
    """Counts how often it is closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_names_are_settings() -> None:
    assert chosen_reward(None) == chosen_reward("")
    assert (chosen_reward("math").setting, chosen_reward("math").function) == ("math", None)
    several = chosen_reward(["math", "own.py:f"])
    assert (several.setting, several.function) == ("math,own.py:f", None)


@pytest.mark.parametrize("given", [right, [right], (right,)], ids=["function", "list", "tuple"])
def test_a_function_is_called_in_this_process(given: Any) -> None:
    chosen = chosen_reward(given)
    assert chosen.setting == "in-process:right"
    assert chosen.function is not None
    assert [score.value for score in chosen.function([item("a", "a"), item("b", "a")])] == [1.0, 0.0]


def test_several_functions_are_added_up_under_their_names() -> None:
    chosen = chosen_reward([right, short])
    assert chosen.setting == "in-process:right+short"
    assert isinstance(chosen.function, FunctionRewards)
    chosen.function.bind_columns({"input": "", "label": ""})
    (score,) = chosen.function([item("ab", "ab")])
    assert (score.value, dict(score.breakdown)) == (1.5, {"right": 1.0, "short": 0.5})
    assert chosen.function.function == (right, short)
    chosen.function.close()


def test_names_and_functions_are_added_up_once_the_names_are_built() -> None:
    chosen = chosen_reward(["exact", short])
    assert chosen.setting == "in-process:'exact'+short"
    assert isinstance(chosen.function, FunctionRewards)
    built = ClosedReward()
    chosen.function.bind_names(lambda name: RewardComponent(name, built))
    (score,) = chosen.function([item("ab", "ab")])
    assert (score.value, dict(score.breakdown)) == (1.5, {"exact": 1.0, "exact/correctness": 1.0, "short": 0.5})
    assert (chosen.function.function, built.closed) == (("exact", short), 0)
    chosen.function.close()
    chosen.function.close()
    assert built.closed == 1
    assert chosen_reward(["exact"]) == chosen_reward("exact")


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (5, "reward is 5"),
        ([], "reward is an empty list"),
        ([right, 5], "reward holds 5"),
        ([right, ""], "reward holds ''"),
        ([right, right], "reward holds two functions called right"),
        (["exact", right, "exact"], "reward holds 'exact' and 'exact', which are both called exact"),
        ([right, "own.py:right"], "reward holds 'own.py:right' and a function called right, which is a part of it"),
    ],
)
def test_what_is_no_reward_is_refused(given: Any, what: str) -> None:
    with pytest.raises(OptionsError) as caught:
        chosen_reward(given)
    assert caught.value.problem.what == what


def test_weights_in_the_order_of_the_rewards_are_answered_with_their_names() -> None:
    chosen = chosen_reward(["exact", right])
    for weights, named in (
        ([1.0, 0.5], "{'exact': 1.0, 'right': 0.5}"),
        ([1.0], "{'exact': 1.0, 'right': 1.0}"),
    ):
        with pytest.raises(OptionsError) as caught:
            refuse_weights_in_order(weights, chosen)
        assert caught.value.problem.do == f"reward_weights={named}"
    refuse_weights_in_order("correctness=1", chosen)
    refuse_weights_in_order({"correctness": 1}, chosen)
