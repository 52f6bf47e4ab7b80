"""The threads behind the engines: rewards of whole groups, and answers to samples that ask between their turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from rft_trainer.async_rollouts.partial_rollout import PartialGroup
from rft_trainer.async_rollouts.protocols import PartialRollout, RolloutType
from rft_trainer.async_rollouts.shared_state import LOOK_SECONDS, SharedState
from rft_trainer.records.rollouts import RolloutGroup
from rft_trainer.records.scores import Reward, RewardItem, Score


def scoring_loop(board: SharedState, kind: RolloutType) -> None:
    """Rewards for every group whose samples have ended, until the board closes."""
    while batch := _next_to_score(board):
        scored = kind.rollouts([(held.prompt, held.drafts) for held in batch])
        with board.changed:
            for held, rollouts in zip(batch, scored, strict=True):
                held.group = RolloutGroup(held.prompt, held.entry.epoch, held.entry.position, tuple(rollouts))
            board.moved()


def answering_loop(board: SharedState, kind: RolloutType, lane: int, drawn: Callable[[], None]) -> None:
    """Answers for every sample of a lane that asks, while others are drawn, until the board closes.

    `drawn` is called where an answer has made a group whole, before its rewards.
    """
    while asking := _next_to_answer(board, lane):
        put = kind.answer([draft for _, draft in asking])
        with board.changed:
            put()
            board.answered += sum(draft.can_draw for _, draft in asking)
            ended = {held.entry: held for held, _ in asking if held.is_whole}
            board.moved()
        for held in ended.values():
            drawn()
            with board.changed:
                board.queue_if_whole(held)


def _next_to_score(board: SharedState) -> list[PartialGroup]:
    """Every group that waits; nothing at the end."""
    with board.changed:
        while not board.to_score and not board.is_closing:
            board.changed.wait(LOOK_SECONDS)
        batch = [] if board.is_closing else list(board.to_score)
        board.to_score.clear()
        return batch


def _next_to_answer(board: SharedState, lane: int) -> list[tuple[PartialGroup, PartialRollout]]:
    """Every sample of the lane that asks; nothing at the end."""
    with board.changed:
        while not board.is_closing:
            every = ((held, draft) for held in board.groups.values() for draft in held.drafts)
            if asking := [(held, draft) for held, draft in every if draft.can_ask and draft.lane == lane]:
                return asking
            board.changed.wait(LOOK_SECONDS)
    return []


class ThreadSafeReward:
    """The same scores; the scoring thread of a queue and an evaluation in the trainer's wait for each other."""

    def __init__(self, reward: Reward) -> None:
        self._reward, self._lock = reward, threading.Lock()

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        """Scores of the items."""
        with self._lock:
            return self._reward(items)

    def close(self) -> None:
        """As of the reward."""
        self._reward.close()
