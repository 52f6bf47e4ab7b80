"""A reward beside others of its kind: what it gives stands under its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rft_trainer.records.scores import Reward, RewardItem, Score


class NamedReward:
    """Reward whose breakdown is `NAME`, its value, and `NAME/PART` for each of its own parts.

    Two rewards that both tell a `correctness` would otherwise overwrite one another in the sum's breakdown.
    """

    def __init__(self, name: str, reward: Reward) -> None:
        self.name, self.reward = name, reward

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        return [self._named(score) for score in self.reward(items)]

    def close(self) -> None:
        """Close the reward that has the name."""
        self.reward.close()

    def _named(self, score: Score) -> Score:
        total = {} if score.value is None else {self.name: score.value}
        parts = {f"{self.name}/{part}": value for part, value in score.breakdown.items() if part != self.name}
        return replace(score, breakdown=total | parts)
