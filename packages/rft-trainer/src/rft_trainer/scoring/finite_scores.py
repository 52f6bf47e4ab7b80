"""Scores of the trainer that are not finite: which rollouts they belong to, and a step without these."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import fields, replace

from rft_trainer.records.rollouts import RolloutGroup
from rft_trainer.scoring.advantages import PolicyScores


def non_finite_scores(scores: PolicyScores) -> dict[int, str]:
    """Return the rollouts with a score that is not finite, by their place in the flat order, and the score's name."""
    bad: dict[int, str] = {}
    for field in fields(scores):
        for index, row in enumerate(getattr(scores, field.name)):
            # the sum of finite log-probs, values and entropies is finite, and one call is faster than one a token
            if not math.isfinite(sum(row)):
                bad.setdefault(index, f"score {field.name!r}")
    return dict(sorted(bad.items()))


def without_rollouts(
    groups: Sequence[RolloutGroup], scores: PolicyScores, bad: Collection[int], smallest_group: int
) -> tuple[list[RolloutGroup], PolicyScores]:
    """Return groups and scores without the rollouts at these places of the flat order.

    A group of which fewer than `smallest_group` are left is left out as a whole.
    """
    kept_groups: list[RolloutGroup] = []
    kept: list[int] = []
    start = 0
    for group in groups:
        places = range(start, start + len(group.rollouts))
        good = [place for place in places if place not in bad]
        if len(good) >= max(smallest_group, 1):
            kept_groups.append(replace(group, rollouts=tuple(group.rollouts[place - start] for place in good)))
            kept += good
        start = places.stop
    rows = {field.name: getattr(scores, field.name) for field in fields(scores)}
    return kept_groups, PolicyScores(**{name: [row[i] for i in kept] if row else row for name, row in rows.items()})
