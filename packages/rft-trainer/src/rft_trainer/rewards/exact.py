"""Exact-match reward, letter for letter: for arithmetic, copying, classification."""

from __future__ import annotations

from collections.abc import Sequence

from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards.rules.table import RuleContext


class ExactReward:
    """Reward of 1 where the response without surrounding white space equals the label, else 0."""

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        return [score_exactly(item) for item in items]

    def close(self) -> None:
        """Do nothing: there are no processes to end."""


def build(context: RuleContext) -> ExactReward:
    """Return the rule, which has no settings."""
    del context
    return ExactReward()


def score_exactly(item: RewardItem) -> Score:
    """Score one item by exact match; unparsable where it has no label."""
    label = item.label_text
    if label is None:
        return Score(None, RewardStatus.UNPARSABLE, detail=f"{item.prompt_id} has no label")
    correctness = float(item.response_text.strip() == label.strip())
    return Score(correctness, breakdown={"correctness": correctness})
