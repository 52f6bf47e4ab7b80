"""A reward that several threads may ask: one after another."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rft_trainer.rewards.records import Reward, RewardItem, Score


class SerialReward:
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
