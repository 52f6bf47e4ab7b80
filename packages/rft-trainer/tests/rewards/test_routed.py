"""Rows judged by the rewards of their sources: the same scores as of each source alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rft_core.errors import OptionsError
from rft_trainer.records.scores import RewardItem, RewardStatus
from rft_trainer.rewards.combined import CombinedReward, RewardComponent
from rft_trainer.rewards.exact import ExactReward
from rft_trainer.rewards.named import NamedReward
from rft_trainer.rewards.routed import RoutedReward, Routes
from rft_trainer.rewards.rules.choice import ChoiceReward
from rft_trainer.rewards.rules.format import FormatReward
from rft_trainer.rewards.rules.numeric import NumericReward

MakeItem = Callable[..., RewardItem]
RULES = {"numeric": NumericReward, "choice": ChoiceReward, "exact": ExactReward, "format": FormatReward}
ROUTES = Routes({"gsm8k": ("numeric", "format"), "arc": ("choice",), "*": ("exact",)})


def routed(routes: Routes = ROUTES) -> RoutedReward:
    parts = {name: RewardComponent(name, NamedReward(name, RULES[name]())) for name in routes.names}
    return RoutedReward(routes, parts)


def item(source: str, response: str, label: str) -> RewardItem:
    return RewardItem(f"{source}:0", "?", response, label, "stop", 1, columns={"data_source": source})


ITEMS = [
    item("gsm8k", "so 18", "18"),
    item("arc", "(B)", "B"),
    item("other", "18", "18"),
    item("gsm8k", "<think></think><answer>17</answer>", "18"),
    item("arc", "18", "B"),
    item("other", "so 18", "18"),
]


def test_a_mixture_has_the_scores_of_each_source_alone() -> None:
    scores = routed()(ITEMS)
    for index, one in enumerate(ITEMS):
        [alone] = routed()([one])
        assert scores[index] == alone
        names = ROUTES.of(one.columns["data_source"])
        assert names is not None
        assert scores[index].value == sum(RULES[name]()([one])[0].value or 0.0 for name in names)


def test_parts_of_other_sources_are_absent() -> None:
    assert [sorted(score.breakdown) for score in routed()(ITEMS[:3])] == [
        ["format", "format/order", "format/tags", "numeric", "numeric/correctness"],
        ["choice", "choice/correctness"],
        ["exact", "exact/correctness"],
    ]


def test_weights_of_sources_that_a_call_lacks_are_no_error() -> None:
    names = ("numeric", "format", "choice", "exact")
    part = RewardComponent("routes", routed(), routed=names)
    assert part.part_names == names
    weights = {"numeric": 0.9, "format/order": 0.5, "choice": 2.0}
    combined = CombinedReward([part], weights)
    assert [score.value for score in combined(ITEMS[:2])] == [0.9, 2.0]
    assert [score.value for score in combined(ITEMS[1:2])] == [2.0]
    with pytest.raises(OptionsError, match="names nothing"):
        CombinedReward([part], {"nothing": 1.0})(ITEMS)


def test_a_source_without_a_route_and_a_reward_without_a_score_have_a_status() -> None:
    reward = routed(Routes({"gsm8k": ("numeric", "exact")}))
    lost, unread = reward([ITEMS[1], replace(ITEMS[0], label="many")])
    assert (lost.value, lost.status) == (None, RewardStatus.FAILED)
    assert "arc" in lost.detail
    assert (unread.status, sorted(unread.breakdown)) == (RewardStatus.UNPARSABLE, ["exact", "exact/correctness"])
    reward.close()


def test_the_source_is_a_column_or_the_name_of_the_file() -> None:
    assert ROUTES.source_of({"data_source": "a"}, "train") == "a"
    assert ROUTES.source_of({}, "train") == "train"
    own = Routes({"3": ("exact",)}, key="level")
    assert own.of(own.source_of({"level": 3}, "train")) == ("exact",)
    assert own.source_of({}, "train") is None
    assert own.of(None) is None
