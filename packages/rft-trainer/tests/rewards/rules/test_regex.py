"""A pattern of the user, which may never end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rft_core.errors import OptionsError
from rft_trainer.records.scores import RewardItem, RewardStatus
from rft_trainer.rewards.registry import reward_by_name
from rft_trainer.rewards.rules.regex import judge

MakeItem = Callable[..., RewardItem]


@pytest.mark.parametrize(
    ("response", "whole", "match"), [("a1b", False, 1.0), ("a1b", True, 0.0), ("1", True, 1.0), ("x", False, 0.0)]
)
def test_a_pattern_is_searched_or_matches_all(response: str, whole: bool, match: float) -> None:
    assert judge({"response": response, "pattern": r"\d", "whole": whole}) == {"reward": match, "match": match}


def test_a_response_on_which_the_pattern_never_ends_has_a_status_and_no_other_has(make_item: MakeItem) -> None:
    options = {"response_pattern": r"(a+)+$"}
    reward = reward_by_name("regex", timeout=1.0, options=options)
    try:
        before, endless, after = reward([make_item("aaa"), make_item("a" * 64 + "!"), make_item("b")])
    finally:
        reward.close()
    assert (before.value, before.breakdown) == (1.0, {"match": 1.0})
    assert (endless.value, endless.status, endless.breakdown) == (None, RewardStatus.TIMEOUT, {})
    assert endless.detail == "no answer within 1 s"
    assert after.value == 0.0


def test_a_pattern_that_cannot_be_read_is_refused_with_its_place() -> None:
    with pytest.raises(OptionsError) as caught:
        reward_by_name("regex", options={"response_pattern": "ab(c"})
    assert caught.value.problem.code == "reward.pattern"
    assert caught.value.problem.do == "correct the pattern at character 2"


def test_a_pattern_that_repeats_more_than_python_counts_is_refused() -> None:
    with pytest.raises(OptionsError, match="repetition number is too large") as caught:
        reward_by_name("regex", options={"response_pattern": "a{99999999999999}"})
    assert caught.value.problem.do == "write smaller numbers between the braces of the pattern"
