"""Scores that are not finite: their rollouts leave the step before advantages are made of them."""

from __future__ import annotations

import math

import pytest

from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup
from rft_trainer.records.scores import RewardStatus
from rft_trainer.scoring.advantages import PolicyScores
from rft_trainer.scoring.finite_scores import non_finite_scores, without_rollouts


def group(name: str, size: int) -> RolloutGroup:
    rollouts = tuple(
        Rollout(name, index, (4, 5), (-1.0, -2.0), (0.0, 0.0), "stop", 0, "said", 1.0, RewardStatus.OK)
        for index in range(size)
    )
    return RolloutGroup(Prompt(name, (1,), "?", "x", "p"), 0, 0, rollouts)


GROUPS = [group("a", 3), group("b", 2)]
FINE = ((-1.0, -2.0),) * 5


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["old", "behaviour", "reference", "values", "entropy"])
def test_a_score_that_is_not_finite_is_found_by_its_place_and_name(name: str, value: float) -> None:
    rows = [*FINE[:3], (-1.0, value), FINE[4]]
    scores = PolicyScores(**{"old": FINE, "behaviour": FINE, name: rows})
    assert non_finite_scores(scores) == {3: f"score {name!r}"}
    assert non_finite_scores(PolicyScores(FINE, FINE)) == {}


def test_the_others_of_a_group_stay_as_long_as_they_are_enough() -> None:
    old = [(float(place), 0.0) for place in range(5)]
    scores = PolicyScores(old, FINE, reference=old)
    kept, left = without_rollouts(GROUPS, scores, {1}, smallest_group=2)
    assert [[one.sample_index for one in each.rollouts] for each in kept] == [[0, 2], [0, 1]]
    assert [row[0] for row in left.old] == [row[0] for row in left.reference] == [0.0, 2.0, 3.0, 4.0]
    assert left.values == ()
    kept, left = without_rollouts(GROUPS, scores, {1, 4}, smallest_group=2)
    assert [each.prompt.prompt_id for each in kept] == ["a"], "one response alone has no group to compare with"
    assert [row[0] for row in left.old] == [0.0, 2.0]
    assert without_rollouts(GROUPS, scores, range(5), smallest_group=1)[0] == []
