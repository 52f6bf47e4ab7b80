"""The threads behind the engines by themselves: rewards of whole groups, answers between turns, a shared reward."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import pytest
from thread_doubles import Asking, Kind, a_board, a_group, ended

from rft_trainer.async_rollouts.scoring_threads import ThreadSafeReward, answering_loop, scoring_loop
from rft_trainer.async_rollouts.shared_state import LOOK_SECONDS
from rft_trainer.records.scores import RewardItem, Score


def test_all_groups_that_wait_are_scored_together_and_keep_their_place() -> None:
    first, second, late = (a_group(n, ended(1), ended(2), epoch=n) for n in (4, 5, 6))
    board, steps = a_board(lambda: None, lambda: board.to_score.append(late))
    board.to_score.extend([first, second])
    kind = Kind()
    scoring_loop(board, kind)
    assert kind.scored == [["p:4", "p:5"], ["p:6"]]
    assert steps.waits == [LOOK_SECONDS] * 3
    assert steps.notified == 2, "once a batch"
    assert not board.to_score
    for group in (first, second, late):
        assert group.group is not None
        assert (group.group.prompt, group.group.epoch, group.group.position) == (
            group.prompt,
            group.entry.epoch,
            group.entry.position,
        )
        assert [one.sample_index for one in group.group.rollouts] == [0, 1]
        assert isinstance(group.group.rollouts, tuple)


def test_nothing_is_scored_after_the_end() -> None:
    board, steps = a_board()
    board.to_score.append(a_group(1, ended(1)))
    board.is_closing = True
    kind = Kind()
    scoring_loop(board, kind)
    assert (kind.scored, steps.waits, list(board.to_score)) == ([], [], [])


def test_a_worker_answers_all_its_own_samples_that_ask() -> None:
    own, other, draws = Asking(1), Asking(0), Asking(1, "draws")
    last = Asking(1)
    board, steps = a_board(lambda: board.groups.update({late.entry: late}))
    groups = [a_group(1, own, other), a_group(2, draws, Asking(1))]
    late = a_group(3, last, ended(2))
    board.groups.update({group.entry: group for group in groups})
    kind, told = Kind("draws", "complete", "complete"), list[int]()
    answering_loop(board, kind, 1, lambda: told.append(len(board.to_score)))
    assert kind.asked == [[own, groups[1].drafts[1]], [last]]
    assert other.stage == "asks"
    assert board.answered == 1, "one of them is drawn on"
    assert told == [0], "before the group waits for its rewards"
    assert list(board.to_score) == [late]
    assert steps.waits == [LOOK_SECONDS] * 2
    assert steps.notified == 2 + 1, "once an answer, once for the group"


def test_a_group_whose_samples_end_together_is_told_of_once() -> None:
    board, _ = a_board()
    group = a_group(1, Asking(), Asking())
    board.groups[group.entry] = group
    told: list[str] = []
    answering_loop(board, Kind("complete", "complete"), 0, partial(told.append, "whole"))
    assert told == ["whole"]
    assert list(board.to_score) == [group]


def test_nobody_is_asked_after_the_end() -> None:
    board, steps = a_board()
    group = a_group(1, Asking())
    board.groups[group.entry] = group
    board.is_closing = True
    kind = Kind()
    answering_loop(board, kind, 0, lambda: None)
    assert (kind.asked, steps.waits) == ([], [])


class CountedReward:
    """Notes whether its lock is held while it scores."""

    def __init__(self) -> None:
        self.lock: threading.Lock | None = None
        self.held: list[bool] = []
        self.is_closed = False

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        assert self.lock is not None
        self.held.append(self.lock.locked())
        return [Score(float(item.num_tokens)) for item in items]

    def close(self) -> None:
        self.is_closed = True


def test_a_shared_reward_scores_for_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, lock = CountedReward(), threading.Lock()
    inner.lock = lock
    monkeypatch.setattr("rft_trainer.async_rollouts.scoring_threads.threading.Lock", lambda: lock)
    reward = ThreadSafeReward(inner)
    items = [RewardItem("p", "?", "x", None, "stop", number) for number in (3, 5)]
    assert [score.value for score in reward(items)] == [3.0, 5.0]
    assert (inner.held, lock.locked(), inner.is_closed) == ([True], False, False)
    reward.close()
    assert inner.is_closed
