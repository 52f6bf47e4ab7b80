"""A weighted sum of reward terms over a group of responses; a response that is no item has a status and no reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rft_core.errors import DataError, OptionsError
from rft_genrec.catalogue.records import SemanticIds
from rft_genrec.rewards.terms import PREFIX_VALUES, Id, ItemScorer, collaborative, prefix, ranking, rule, semantic

TERMS = ("rule", "ranking", "prefix", "semantic", "collaborative")
"""Names of the terms, as weights have them."""


@dataclass(frozen=True, slots=True)
class ItemReward:
    """Reward of one response."""

    status: Literal["ok", "invalid"]
    """Invalid: the response is the ID of no item."""
    value: float | None
    """Weighted sum of the terms; None where the response is invalid."""
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Each term without its weight."""


@dataclass(frozen=True)
class GroupReward:
    """Reward of the responses to one history: terms by their weights.

    Example: `GroupReward(ids, {"rule": 1.0, "ranking": 1.0})` is the reward that MiniOneRec trains with.
    """

    ids: SemanticIds
    weights: Mapping[str, float]
    prefix_values: tuple[float, ...] = PREFIX_VALUES
    embeddings_ND: NDArray[np.float32] | None = None
    """[N, D] one row an item, for `semantic`."""
    scorer: ItemScorer | None = None
    """For `collaborative`."""

    def __post_init__(self) -> None:
        """Check weights and what the terms need.

        Raises:
            OptionsError: a term that there is none of, no term, or one without what it is computed from.
            DataError: another number of embeddings than of items.
        """
        unknown = sorted(set(self.weights) - set(TERMS))
        if unknown or not self.weights:
            what = f"reward term {unknown[0]}" if unknown else "no reward term"
            raise _refusal(what, f"terms are {', '.join(TERMS)}", "rule=1,ranking=1")
        if "semantic" in self.weights and self.embeddings_ND is None:
            raise _refusal(
                "term semantic without embeddings", "it compares embeddings of items", "a file of embeddings"
            )
        if "collaborative" in self.weights and self.scorer is None:
            what, why = "term collaborative without a scorer", "it ranks an item by a model of users and items"
            raise _refusal(what, why, "a scorer, or leave it out")
        if len(self.prefix_values) < 2:
            raise _refusal(f"prefix values {self.prefix_values}", "one for no level, one for all", "0,0.2,0.5,1")
        if self.embeddings_ND is not None and len(self.embeddings_ND) != len(self.ids):
            raise DataError(
                code="genrec.reward_embeddings",
                what=f"{len(self.embeddings_ND):,} embeddings for {len(self.ids):,} items",
                where="embeddings of the reward",
                why="row n is the embedding of item n",
                do="embeddings of this catalogue",
            )

    def __call__(self, responses: Sequence[str], target: str, history: Sequence[int] = ()) -> list[ItemReward]:
        """Score the responses to one history.

        Args:
            responses: texts in the order of the group; white space between tokens does not count.
            target: the ID of the item that was taken, likewise.
            history: items before it, for `collaborative`.

        Returns:
            One reward a response. Terms that look at places count an invalid response as a miss at its place.

        Raises:
            DataError: the target is the ID of no item.
        """
        wanted = self.read(target)
        if wanted is None:
            raise DataError(
                code="genrec.reward_target",
                what=f"the target {target[:80]!r} is the ID of no item",
                where="label of a row",
                why="a reward compares with an item of the catalogue",
                do="rows that were made with these IDs",
            )
        group = [self.read(response) for response in responses]
        valid = [place for place, one in enumerate(group) if one is not None]
        parts: list[dict[str, float]] = [{} for _ in group]
        for name in self.weights:
            for place, value in zip(valid, self._term(name, group, wanted, history), strict=True):
                parts[place][name] = value
        return [
            ItemReward("invalid", None)
            if one is None
            else ItemReward("ok", sum(self.weights[name] * value for name, value in found.items()), found)
            for one, found in zip(group, parts, strict=True)
        ]

    def read(self, response: str) -> Id | None:
        """Return the ID that a text is; None where it is the ID of no item."""
        return self._ids_by_text.get("".join(response.split()))

    def _term(self, name: str, group: Sequence[Id | None], target: Id, history: Sequence[int]) -> list[float]:
        """Values of a term for the valid members of a group."""
        if name == "ranking":  # by the places of all members, the invalid ones too
            values = ranking([one or () for one in group], target)
            return [value for value, one in zip(values, group, strict=True) if one is not None]
        found = [one for one in group if one is not None]
        if name == "rule":
            return rule(found, target)
        if name == "prefix":
            return prefix(found, target, self.prefix_values)
        items = [self.ids.items_by_id[one] for one in found]
        if name == "semantic":
            assert self.embeddings_ND is not None
            return semantic(items, self.ids.items_by_id[target], self.embeddings_ND)
        assert self.scorer is not None
        return collaborative(items, self.scorer.scores([history])[0])

    @cached_property
    def _ids_by_text(self) -> Mapping[str, Id]:
        return {"".join("".join(tokens).split()): tokens for tokens in self.ids.items_by_id}


def _refusal(what: str, why: str, remedy: str) -> OptionsError:
    return OptionsError(code="genrec.reward_terms", what=what, where="terms of the reward", why=why, do=remedy)
