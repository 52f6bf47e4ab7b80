r"""Numbers within a tolerance: thousands separators, percent, fractions, powers of ten.

The cost is bounded, since a number is looked for in the last `_TAIL` characters alone, so that no process is needed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards.rules.final_answer import final_answer
from rft_trainer.rewards.rules.table import RuleContext

_TAIL = 1000
_LARGEST_POWER = 400
# a sign belongs to a number only where no number or word stands before it: 3-5 are two numbers
_SIGN = r"(?:(?<![\w)}.])[-+])?"
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_POWER = r"[eE](?P<e>[-+]?[0-9]+)|\s?(?:\\times|\\cdot|\*|\u00d7)\s?10\s?\^\s?\{?(?P<power>[-+]?[0-9]+)\}?"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})\\?\$?\s?(?:"
    r"\\[dt]?frac\s?\{\s?(?P<frac_top>-?[0-9]+)\s?\}\s?\{\s?(?P<frac_bottom>[0-9]+)\s?\}"
    r"|(?:(?P<whole>[0-9]+)\s)?(?P<top>[0-9]+)\s?/\s?(?P<bottom>[0-9]+)(?![0-9/])"
    rf"|(?P<decimal>{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)(?:{_POWER})?"
    r")\s?(?P<percent>\\?%)?"
)


@dataclass(frozen=True, slots=True)
class WrittenNumber:
    """A number as it is written: 50% is the value 50 and a percent sign."""

    value: Fraction
    is_percent: bool = False


class NumericReward:
    """Reward of 1 where the number of the response is that of the label, |p - g| <= max(a, r |g|), else 0.

    The number of a response is the last one in the answer that it marks, or without a mark in the whole response; a is
    the absolute tolerance, r the relative one, both exact in decimal. A percent sign on one side alone may be left out
    or count as 1/100: 50% is 50 and 0.5. A response without a number is wrong, a label without one unparsable.
    """

    def __init__(self, tolerance: float = 0.0, relative_tolerance: float = 1e-6) -> None:
        self._absolute, self._relative = Fraction(str(tolerance)), Fraction(str(relative_tolerance))

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        return [self._score(item) for item in items]

    def close(self) -> None:
        """Do nothing: there are no processes to end."""

    def _score(self, item: RewardItem) -> Score:
        gold = last_number(item.label_text or "")
        if gold is None:
            return Score(None, RewardStatus.UNPARSABLE, detail=f"the label of {item.prompt_id} holds no number")
        number = last_number(item.response_text)
        correctness = float(number is not None and self._equal(gold, number))
        return Score(correctness, breakdown={"correctness": correctness})

    def _equal(self, gold: WrittenNumber, number: WrittenNumber) -> bool:
        pairs = [(gold.value, number.value)]
        if gold.is_percent != number.is_percent:
            pairs.append((gold.value / 100, number.value) if gold.is_percent else (gold.value, number.value / 100))
        return any(abs(p - g) <= max(self._absolute, self._relative * abs(g)) for g, p in pairs)


def build(context: RuleContext) -> NumericReward:
    """Return the rule with the tolerances of the settings."""
    return NumericReward(context.options["number_tolerance"], context.options["number_relative_tolerance"])


def last_number(text: str) -> WrittenNumber | None:
    """Return the last number of the answer that a text marks, or of the text where it marks none."""
    answer = final_answer(text)
    tail = (text if answer is None else answer)[-_TAIL:].replace("\u2212", "-")
    found = [number for match in _NUMBER.finditer(tail) if (number := _value(match)) is not None]
    return found[-1] if found else None


def _value(match: re.Match[str]) -> WrittenNumber | None:
    """Return the value of a match; None for a division by zero and for a power that no float has."""
    power = int((match["e"] or match["power"] or "0")[:9])
    bottom = int(match["frac_bottom"] or match["bottom"] or 1)
    if not bottom or abs(power) > _LARGEST_POWER:
        return None
    if match["decimal"]:
        value = Fraction(match["decimal"].replace(",", "")) * Fraction(10) ** power
    elif match["top"]:
        value = int(match["whole"] or 0) + Fraction(int(match["top"]), bottom)
    else:
        value = Fraction(int(match["frac_top"]), bottom)
    return WrittenNumber(-value if match["sign"] == "-" else value, bool(match["percent"]))
