"""Rewards that judge the rows of some sources: the source of a row, a column, chooses which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards.combined import RewardComponent

ANY = "*"
"""In the place of a source: all that no other route names."""
SOURCE_KEY = "data_source"
"""Column of the source where no other is named, as verl calls it."""


@dataclass(frozen=True, slots=True)
class Routes:
    """The rewards of each source.

    Example::

        Routes({"openai/gsm8k": ("gsm8k",), "*": ("exact", "format")}).of("openai/gsm8k")  # ("gsm8k",)
    """

    by_source: Mapping[str, tuple[str, ...]]
    """Names of rewards by source; `ANY` for those of all others."""
    key: str = SOURCE_KEY
    """Column that names the source of a row."""

    def source_of(self, columns: Mapping[str, Any], file: str) -> str | None:
        """Return the source of a row; None where it lacks the column.

        `file` names the source of rows without a column `data_source`, as for functions of a user.
        """
        value = columns.get(self.key)
        if value is None:
            return file if self.key == SOURCE_KEY else None
        return str(value)

    def of(self, source: str | None) -> tuple[str, ...] | None:
        """Return the names of a source's rewards; None where no route leads there."""
        if source is None:
            return None
        return self.by_source.get(source, self.by_source.get(ANY))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all rewards, each once."""
        return tuple(dict.fromkeys(name for names in self.by_source.values() for name in names))


class RoutedReward:
    """Sum of the rewards of a response's source; a part of another source is absent from its breakdown."""

    def __init__(self, routes: Routes, parts: Mapping[str, RewardComponent]) -> None:
        """`parts`: the component of each reward of the routes, by the name that the routes use."""
        assert set(parts) == set(routes.names), (sorted(parts), routes.names)
        self._routes, self._parts = routes, dict(parts)

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        names = [self._routes.of(self._source(item)) for item in items]
        found: list[dict[str, Score]] = [{} for _ in items]
        for name, part in self._parts.items():
            indices = [index for index, own in enumerate(names) if own is not None and name in own]
            # one call, in order: the samples of a prompt, which have one source, stay adjacent
            for index, score in zip(indices, part.reward([items[index] for index in indices]), strict=True):
                found[index][name] = score
        return [
            self._no_route(item) if own is None else _sum([scores[name] for name in own])
            for item, own, scores in zip(items, names, found, strict=True)
        ]

    def close(self) -> None:
        """Close the reward of every part."""
        for part in self._parts.values():
            part.reward.close()

    def _source(self, item: RewardItem) -> str | None:
        return self._routes.source_of(item.columns, item.prompt_id.rpartition(":")[0])

    def _no_route(self, item: RewardItem) -> Score:
        detail = f"no route for {self._routes.key} = {self._source(item)!r} of {item.prompt_id}"
        return Score(None, RewardStatus.FAILED, detail=detail)


def _sum(scores: Sequence[Score]) -> Score:
    """Return the sum; the first score without a value says why there is none."""
    breakdown = {name: value for score in scores for name, value in score.breakdown.items()}
    for score in scores:
        if score.value is None:
            return replace(score, breakdown=breakdown)
    value = sum(score.value for score in scores if score.value is not None)
    return Score(value, breakdown=breakdown, steps=next((score.steps for score in scores if score.steps), ()))
