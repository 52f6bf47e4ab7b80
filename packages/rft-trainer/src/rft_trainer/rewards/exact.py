"""Right is what equals the label, letter for letter: arithmetic, copying, classification."""

from __future__ import annotations

from collections.abc import Sequence

from rft_trainer.records.scores import RewardItem, RewardStatus, Score


class ExactReward:
    """1 where the response without surrounding white space equals the label, else 0."""

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        return [score_exactly(item) for item in items]

    def close(self) -> None:
        """Nothing to end."""


def score_exactly(item: RewardItem) -> Score:
    """Unparsable where the item has no label."""
    if item.label is None:
        return Score(None, RewardStatus.UNPARSABLE, detail=f"{item.prompt_id} has no label")
    correctness = float(item.response_text.strip() == item.label.strip())
    return Score(correctness, breakdown={"correctness": correctness})
