"""A reward that does not repeat itself or mixes up its responses is named with both values, a sound one is not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import count

import pytest

from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.scoring.repeated_reward import RepeatedReward, order_and_spread, second_look


def item(number: int, prompt: str = "rows.jsonl:1") -> RewardItem:
    return RewardItem(prompt, "1+1=", f"response {number}", "2", "stop", 2)


ITEMS = [item(number, f"rows.jsonl:{number // 3}") for number in range(9)]


class Given:
    """A reward made of a function of all texts; counts its calls and the responses in them."""

    def __init__(self, values: Callable[[list[str]], Sequence[float | None]]) -> None:
        self.values, self.calls, self.closed = values, list[int](), False

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        self.calls.append(len(items))
        found = self.values([each.response_text for each in items])
        return [Score(None, RewardStatus.FAILED) if value is None else Score(value) for value in found]

    def close(self) -> None:
        self.closed = True


def own(texts: list[str]) -> list[float]:
    """One score a response."""
    return [float(text[-1]) for text in texts]


def test_a_sound_reward_is_called_once_more_with_a_few_responses_and_nothing_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = Given(own)
    reward = RepeatedReward("mine", given)
    assert reward([]) == []
    for _ in range(3):
        assert [score.value for score in reward(ITEMS)] == [float(n) for n in range(9)]
    assert given.calls == [0, 9, 6, 9, 9], "the responses to two prompts, once"
    assert caplog.records == []
    reward.close()
    assert given.closed


def test_a_reward_that_does_not_repeat_itself_is_named_with_both_values(caplog: pytest.LogCaptureFixture) -> None:
    numbers = count()
    given = Given(lambda texts: [next(numbers) / 8 for _ in texts])
    with caplog.at_level(logging.WARNING):
        scores = RepeatedReward("file.py:mine", given)(ITEMS)
    assert [score.value for score in scores] == [n / 8 for n in range(9)], "the first answer counts"
    [record] = caplog.records
    told = record.getMessage()
    assert told.startswith("the reward file.py:mine does not repeat itself: of 6 responses")
    assert "it gave 0 and then 1.75 to the response 'response 0' of rows.jsonl:0" in told
    assert "do  --reward_random" in told


def test_a_reward_that_changes_during_a_run_is_named_once_with_both_values(caplog: pytest.LogCaptureFixture) -> None:
    shift = [0.0]
    given = Given(lambda texts: [value + shift[0] for value in own(texts)])
    reward = RepeatedReward("mine", given)
    later = [item(number, f"rows.jsonl:{number}") for number in range(9)]
    with caplog.at_level(logging.WARNING):
        for call in range(400):
            shift[0] = 0.5 if call >= 150 else 0.0
            reward(ITEMS if call == 0 else later)
            assert bool(caplog.records) == (call >= 199), "looked at in the calls 100, 200, ..."
    assert sum(given.calls) == 400 * 9 + 3 * 6, "six responses at the start, in the 100th and in the 200th call"
    [record] = caplog.records
    told = record.getMessage()
    assert told.startswith("the reward mine has changed since the start: of 6 responses 6 get another score")
    assert "it gave 0 and then 0.5 to the response 'response 0' of rows.jsonl:0" in told


@pytest.mark.parametrize(
    "values",
    [
        lambda texts: [float(number) for number in range(len(texts))],
        lambda texts: sorted(own(texts)),
        lambda texts: own(texts[1:] + texts[:1]),
    ],
    ids=["by position", "sorted", "shifted by one"],
)
def test_scores_in_another_order_than_the_responses_are_named(values: Callable[[list[str]], list[float]]) -> None:
    reward = Given(values)
    scores = reward(ITEMS[:3])
    told = second_look(reward, ITEMS[:3], scores)
    assert told.startswith("depends on the order of the responses: of 3 that came in the reverse order")
    assert "one score a response is wanted" in told


def test_a_reward_that_compares_the_responses_of_a_prompt_is_sound() -> None:
    reward = Given(lambda texts: [float(sum(other < text for other in texts)) for text in texts])
    assert second_look(reward, ITEMS[:3], reward(ITEMS[:3])) == ""


def test_a_response_without_a_score_is_no_difference() -> None:
    answers = iter([[1.0, None, 3.0], [3.0, 2.0, None]])
    reward = Given(lambda texts: next(answers))
    assert second_look(reward, ITEMS[:3], reward(ITEMS[:3])) == ""


def test_a_long_response_is_cut() -> None:
    numbers = count()
    reward = Given(lambda texts: [float(next(numbers)) for _ in texts])
    long = RewardItem("p", "", "x" * 1000, None, "stop", 1)
    assert len(second_look(reward, [long], reward([long]))) < 300


@pytest.mark.parametrize(
    ("right", "other", "told"),
    [
        (1.0, 0.0, ""),
        (0.5, 0.5, "both get 0.5"),
        (0.0, 1.0, "gets 0, less than the 1 of a made-up response"),
    ],
)
def test_order_and_spread_of_a_right_and_a_made_up_response(right: float, other: float, told: str) -> None:
    found = order_and_spread(ITEMS[:2], [Score(right), Score(other)])
    assert told in found
    assert bool(told) == bool(found)


def test_without_a_label_or_a_score_nothing_is_said_of_the_order() -> None:
    assert order_and_spread(ITEMS[:1], [Score(1.0)]) == ""
    assert order_and_spread(ITEMS[:2], [Score(None, RewardStatus.FAILED), Score(1.0)]) == ""


def test_after_an_evaluation_the_first_prompt_with_several_responses_is_looked_at_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # a number a place: of one response to a prompt, scored by itself, it is always 0
    given = Given(lambda texts: [float(place if texts[0] != texts[-1] else 0) for place in range(len(texts))])
    reward = RepeatedReward("mine", given)
    with caplog.at_level(logging.WARNING):
        reward([item(0, "rows.jsonl:0")])
        assert caplog.records == []
        reward(ITEMS[:3])
        reward(ITEMS[:3])
    [record] = caplog.records
    assert "depends on the order of the responses" in record.getMessage()
