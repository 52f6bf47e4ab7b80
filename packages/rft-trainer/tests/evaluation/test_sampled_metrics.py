"""pass@k, maj@k, best@k and picked@k of several samples, a number a prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rft_trainer.evaluation.sampled_metrics import ScoredSample, by_prompt, default_ks, hits_at_k

RIGHT, WRONG = ScoredSample(1.0, True, "4"), ScoredSample(0.0, False, "5")


@pytest.mark.parametrize(
    ("num_samples", "expected"), [(1, ()), (2, (1, 2)), (4, (1, 2, 4)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))]
)
def test_without_a_choice_k_is_a_power_of_two_or_all(num_samples: int, expected: tuple[int, ...]) -> None:
    assert default_ks(num_samples) == expected


def test_each_prompt_has_its_own_numbers() -> None:
    found = by_prompt([[RIGHT, WRONG, WRONG], [RIGHT, RIGHT, WRONG]], (1, 3))
    assert list(found) == ["pass@1", "pass@3", "maj@3", "best@3"]
    assert found["pass@1"] == pytest.approx((1 / 3, 2 / 3))
    assert (found["pass@3"], found["maj@3"], found["best@3"]) == ((1.0, 1.0), (0.0, 1.0), (1.0, 1.0))


def test_scores_pick_one_of_several_where_there_are_any() -> None:
    def scored(sample: ScoredSample, score: float | None) -> ScoredSample:
        return replace(sample, score=score)

    found = by_prompt([[scored(RIGHT, 0.2), scored(WRONG, 0.1)], [scored(RIGHT, None), scored(WRONG, -3.0)]], (1, 2))
    assert "picked@1" not in found, "it would be the accuracy"
    assert found["picked@2"] == (1.0, 0.0), "one without a score is not picked beside one that has a score"
    nobody = by_prompt([[RIGHT, WRONG], [scored(RIGHT, 1.0), scored(WRONG, 2.0)]], (2,))
    assert nobody["picked@2"] == (0.5, 0.0)


def test_a_prompt_with_fewer_than_k_scored_samples_has_none() -> None:
    found = by_prompt([[RIGHT], [RIGHT, WRONG]], (2,))
    assert found["pass@2"] == (None, 1.0)
    assert found["maj@2"] == (None, 0.5)
    assert by_prompt([[RIGHT]], ()) == {}


def test_hits_count_the_first_responses_and_fewer_are_all_there_are() -> None:
    found = hits_at_k([[False, True, False], [False], [True, False, False]], (1, 2, 3))
    assert found == {"hit@1": (0.0, 0.0, 1.0), "hit@2": (1.0, 0.0, 1.0), "hit@3": (1.0, 0.0, 1.0)}
