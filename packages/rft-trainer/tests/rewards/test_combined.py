"""Several rewards as one: which parts are asked where, and what is said of a part without a value."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rft_core.errors import OptionsError
from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards.combined import CombinedReward, RewardComponent, unknown_parts

MakeItem = Callable[..., RewardItem]


class Given:
    """One score after the other; notes the thread in which it is asked."""

    def __init__(self, *scores: Score) -> None:
        self.scores, self.threads, self.closed = scores, list[str](), 0

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        self.threads.append(threading.current_thread().name)
        return list(self.scores[: len(items)])

    def close(self) -> None:
        self.closed += 1


def test_only_parts_that_wait_have_threads_of_their_own(make_item: MakeItem) -> None:
    far, near = Given(Score(1.0)), Given(Score(2.0))
    combined = CombinedReward([RewardComponent("near", near), RewardComponent("far", far, waits=True)])
    assert [score.value for score in combined([make_item("a")])] == [3.0]
    assert near.threads == [threading.current_thread().name]
    assert far.threads != near.threads


def test_as_many_threads_run_as_parts_wait(make_item: MakeItem, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Pool:
        def __init__(self, num: int, name: str) -> None:
            asked.append(num)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def submit(self, function: Callable[..., Any], items: Any) -> Any:
            class Done:
                def result(self) -> Any:
                    return function(items)

            return Done()

    monkeypatch.setattr("rft_trainer.rewards.combined.ThreadPoolExecutor", Pool)
    for waits in ([False, False], [True, False], [True, True]):
        parts = [RewardComponent(str(n), Given(Score(1.0)), wait) for n, wait in enumerate(waits)]
        assert [score.value for score in CombinedReward(parts)([make_item("a")])] == [2.0]
    assert asked == [1, 1, 2]


def test_the_first_part_without_a_value_says_why_and_the_others_are_told(make_item: MakeItem) -> None:
    late = Score(None, RewardStatus.TIMEOUT, detail="late", breakdown={"far/x": 1.0})
    failed = Score(None, RewardStatus.FAILED, detail="failed")
    parts = [
        RewardComponent("near", Given(Score(2.0), Score(3.0, breakdown={"a": 1.0, "b": 2.0}))),
        RewardComponent("far", Given(late, Score(0.0))),
        RewardComponent("other", Given(failed, Score(4.0))),
    ]
    for weights in (None, {"near": 1.0, "a": 1.0, "far": 1.0, "other": 0.5}):
        first, second = CombinedReward(parts, weights)([make_item("a"), make_item("b")])
        assert (first.value, first.status, first.detail) == (None, RewardStatus.TIMEOUT, "far: late")
        assert first.breakdown == {"near": 2.0, "far/x": 1.0}
        assert second.value == (7.0 if weights is None else 1.0 + 0.0 + 2.0)
        assert second.breakdown == {"a": 1.0, "b": 2.0, "far": 0.0, "other": 4.0}


def test_a_weight_that_names_no_part_is_refused_only_where_every_response_has_parts(make_item: MakeItem) -> None:
    none = Score(None, RewardStatus.FAILED)
    items = [make_item("a"), make_item("b")]

    def scores(*given: Score) -> list[Score]:
        return CombinedReward([RewardComponent("f", Given(*given))], {"g": 1.0})(items)

    with pytest.raises(OptionsError) as caught:
        scores(Score(1.0), Score(1.0))
    assert caught.value.problem.code == "reward.unknown_part"
    assert [score.value for score in scores(none, Score(1.0))] == [None, 0.0]
    assert [score.value for score in scores(none, none)] == [None, None]
    known = CombinedReward([RewardComponent("f", Given(Score(1.0), Score(1.0)))], {"f": 3.0})
    assert [score.value for score in known(items)] == [3.0, 3.0]


def test_two_parts_of_one_name_are_an_error() -> None:
    with pytest.raises(AssertionError):
        CombinedReward([RewardComponent("a", Given()), RewardComponent("a", Given())])


def test_the_first_steps_are_kept(make_item: MakeItem) -> None:
    parts = [
        RewardComponent("a", Given(Score(1.0))),
        RewardComponent("b", Given(Score(1.0, steps=((1, 1.0),)))),
        RewardComponent("c", Given(Score(1.0, steps=((2, 2.0),)))),
    ]
    assert CombinedReward(parts)([make_item("x")])[0].steps == ((1, 1.0),)
    assert CombinedReward(parts[:1])([make_item("x")])[0].steps == ()


@pytest.mark.parametrize(
    ("weights", "known", "remedy"),
    [
        ({"exact": 1.0, "good": 0.1}, {"correctness", "good"}, "correctness=1,good=0.1"),
        ({"exact": 1.0, "gud": 0.1}, {"correctness", "good"}, "correctness=1"),
        ({"gsm8k": 1.0, "good": 0.1}, {"correctness", "format", "good"}, "good=0.1"),
        ({"other": 1.0, "good": 0.1}, {"correctness", "good", "format"}, "good=0.1"),
    ],
)
def test_a_weight_for_a_reward_by_its_name_is_answered_with_the_name_of_its_part(
    weights: dict[str, float], known: set[str], remedy: str
) -> None:
    unknown = [name for name in weights if name not in known]
    assert unknown_parts(weights, unknown, known, "").problem.do == f"--reward_weights {remedy}"
