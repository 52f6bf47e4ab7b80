"""Threads behind the engines: rewards of whole groups, and environment answers between the turns of samples."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from rft_core.errors import OutageError
from rft_trainer.async_rollouts.partial_rollout import PartialGroup
from rft_trainer.async_rollouts.protocols import PartialRollout, RolloutType
from rft_trainer.async_rollouts.shared_state import LOOK_SECONDS, SharedState
from rft_trainer.records.rollouts import RolloutGroup
from rft_trainer.records.scores import Reward, RewardItem, Score


def scoring_loop(board: SharedState, kind: RolloutType) -> None:
    """Score every group whose samples have ended, until the shared state closes or a reward server is away."""
    while batch := _next_to_score(board):
        # outside of the lock: rewards may take seconds, and samples are drawn meanwhile
        try:
            scored = kind.rollouts([(group.prompt, group.drafts) for group in batch])
        except OutageError as outage:
            with board.changed:
                board.outage = outage
                board.moved()
            return
        with board.changed:
            for group, rollouts in zip(batch, scored, strict=True):
                group.group = RolloutGroup(group.prompt, group.entry.epoch, group.entry.position, tuple(rollouts))
            board.moved()


def answering_loop(board: SharedState, kind: RolloutType, worker_index: int, drawn: Callable[[], None]) -> None:
    """Answer every waiting sample of a worker while others are sampled, until the shared state closes.

    `drawn` is called where an answer has made a group whole, before its rewards.
    """
    while asking := _next_to_answer(board, worker_index):
        # outside of the lock, since a tool may hang; the drafts themselves change in `put` alone
        put = kind.answer([draft for _, draft in asking])
        with board.changed:
            put()
            # enough answered samples end the running draw early, so that they are drawn on
            board.answered += sum(draft.needs_generation for _, draft in asking)
            ended = {group.entry: group for group, _ in asking if group.is_complete}
            board.moved()
        for group in ended.values():
            drawn()
            with board.changed:
                board.queue_if_complete(group)


def _next_to_score(board: SharedState) -> list[PartialGroup]:
    """Wait for groups to score and return them all; empty at the end."""
    with board.changed:
        while not board.to_score and not board.is_closing:
            board.changed.wait(LOOK_SECONDS)
        # all that wait together, since rewards work on batches
        batch = [] if board.is_closing else list(board.to_score)
        board.to_score.clear()
        return batch


def _next_to_answer(board: SharedState, worker_index: int) -> list[tuple[PartialGroup, PartialRollout]]:
    """Wait for samples of the worker that need an answer and return them all; empty at the end."""
    with board.changed:
        while not board.is_closing:
            every = ((group, draft) for group in board.groups.values() for draft in group.drafts)
            if asking := [
                (group, draft)
                for group, draft in every
                if draft.awaits_environment and draft.worker_index == worker_index
            ]:
                return asking
            board.changed.wait(LOOK_SECONDS)
    return []


class ThreadSafeReward:
    """A reward behind a lock, shared by the scoring thread of a queue and an evaluation in the trainer's thread."""

    def __init__(self, reward: Reward) -> None:
        self._reward, self._lock = reward, threading.Lock()

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        """Score the items while no other thread scores."""
        with self._lock:
            return self._reward(items)

    def close(self) -> None:
        """Close the wrapped reward."""
        self._reward.close()
