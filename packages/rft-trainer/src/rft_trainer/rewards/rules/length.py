"""Length of a response within a range. It is counted in this process, because counting always ends."""

from __future__ import annotations

from collections.abc import Sequence

from rft_trainer.records.scores import RewardItem, Score
from rft_trainer.rewards.rules.table import RuleContext


class LengthReward:
    """Reward of 1 for n in [low, high], else max(0, 1 - d / slack) with the distance d from the range; 0 without slack.

    n counts tokens or characters. DAPO's penalty for long responses is another thing, of the algorithm:
    `--overlong_buffer`.
    """

    def __init__(self, low: int, high: int, *, slack: int = 0, unit: str = "tokens") -> None:
        """`high` of 0 is no upper end; `unit` is "tokens" or "characters"."""
        self._low, self._high, self._slack, self._unit = low, high, slack, unit

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        return [self._score(item) for item in items]

    def close(self) -> None:
        """Do nothing: there are no processes to end."""

    def _score(self, item: RewardItem) -> Score:
        number = item.num_tokens if self._unit == "tokens" else len(item.response_text)
        beyond = number - self._high if self._high else 0
        distance = max(self._low - number, beyond, 0)
        value = 1.0 if not distance else max(0.0, 1.0 - distance / self._slack) if self._slack else 0.0
        return Score(value, breakdown={"length": value})


def build(context: RuleContext) -> LengthReward:
    """Return the rule with the range of the settings."""
    options = context.options
    low, high = options["length_range"]
    return LengthReward(low, high, slack=options["length_slack"], unit=options["length_unit"])
