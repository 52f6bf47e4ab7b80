"""Form of a response: its tags, each once and in their order, with nothing but white space around them."""

from __future__ import annotations

from collections.abc import Sequence

from rft_trainer.records.scores import RewardItem, Score
from rft_trainer.rewards.rules.table import RuleContext


class FormatReward:
    """Reward of 1 where the response is `<think>...</think><answer>...</answer>` and nothing else, else 0.

    Parts, in [0, 1]: `tags` is the share of the tags that are opened once and closed once, in this order; `order` is
    1 where all of them are, one after the other, with white space alone before, between and behind them. The cost is
    linear in the length of the response, so that no process is needed. The form is that of DeepSeek-R1 (2025, 2.2.2).
    """

    def __init__(self, tags: Sequence[str] = ("think", "answer")) -> None:
        """`tags`: names without brackets, in the order in which they have to stand."""
        self._tags = tuple(tags)

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        return [self._score(item.response_text) for item in items]

    def close(self) -> None:
        """Do nothing: there are no processes to end."""

    def _score(self, text: str) -> Score:
        places = [_place(text, tag) for tag in self._tags]
        found = [place for place in places if place is not None]
        order = float(len(found) == len(places) and _follow(text, found))
        return Score(order, breakdown={"tags": len(found) / len(places), "order": order})


def build(context: RuleContext) -> FormatReward:
    """Return the rule with the tags of the settings."""
    return FormatReward([tag.strip() for tag in context.options["format_tags"].split(",")])


def _place(text: str, tag: str) -> tuple[int, int] | None:
    """Return start and end of a block; None where it is not opened once and closed once behind that."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    if text.count(opening) != 1 or text.count(closing) != 1:
        return None
    start, end = text.index(opening), text.index(closing)
    return (start, end + len(closing)) if start < end else None


def _follow(text: str, places: Sequence[tuple[int, int]]) -> bool:
    """Return whether the blocks follow one another, with white space alone around them."""
    edges = [0, *(edge for place in places for edge in place), len(text)]
    return all(start <= end and not text[start:end].strip() for start, end in zip(edges[::2], edges[1::2], strict=True))
