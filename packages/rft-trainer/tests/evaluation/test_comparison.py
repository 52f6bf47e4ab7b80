"""Two evaluations in pairs: differences, tests, and the prompts that changed."""

from __future__ import annotations

from typing import Any

import pytest

from rft_algos.evaluation.paired_tests import mcnemar_exact
from rft_algos.statistics import paired_difference_interval
from rft_core.errors import DataError
from rft_trainer.evaluation.comparison import MCNEMAR, SIGN_FLIPS, compare_rows


def rows(*rewards: float | None, samples: int = 1, label: str = "1") -> list[dict[str, Any]]:
    return [
        {"prompt_id": f"p:{n // samples}", "sample": n % samples, "label": label, "reward": reward, "response": f"r{n}"}
        for n, reward in enumerate(rewards)
    ]


def test_right_and_wrong_are_tested_by_mcnemar_and_the_change_is_after_minus_before() -> None:
    before, after = rows(0, 0, 0, 0, 1, 1), rows(1, 1, 1, 0, 1, 0)
    found = compare_rows(before, after, seed=0, where="here")
    change = found.accuracy
    assert (change.before, change.after) == pytest.approx((2 / 6, 4 / 6))
    assert change.interval == paired_difference_interval([0, 0, 0, 0, 1, 1], [1, 1, 1, 0, 1, 0])
    assert (change.p_value, change.test) == (mcnemar_exact(3, 1), MCNEMAR)
    assert (found.num_better, found.num_worse, found.num_pairs) == (3, 1, 6)
    assert [row["prompt_id"] for row in found.changed] == ["p:0", "p:1", "p:2", "p:5"]
    assert found.changed[0]["correct"] == [0.0, 1.0]
    assert found.changed[0]["responses"] == [["r0"], ["r0"]]
    record = found.as_record("other")
    assert (record["with"], record["accuracy"]["interval"]["estimate"]) == ("other", pytest.approx(2 / 6))


def test_the_other_way_round_the_change_has_the_other_sign() -> None:
    before, after = rows(0, 0.5, 0, 1), rows(1, 0.25, 0, 1)
    one, other = compare_rows(before, after, seed=0, where=""), compare_rows(after, before, seed=0, where="")
    assert one.reward.interval.estimate == -other.reward.interval.estimate == pytest.approx(0.75 / 4)
    assert one.reward.p_value == other.reward.p_value
    assert one.reward.test == SIGN_FLIPS


def test_shares_of_several_samples_take_the_sign_flips_which_follow_the_seed() -> None:
    before = rows(*[n % 2 for n in range(80)], samples=2)
    after = rows(*[float(n % 3 != 0) for n in range(80)], samples=2)
    found = [compare_rows(before, after, seed=seed, where="").accuracy for seed in (0, 0, 1)]
    assert found[0].test == SIGN_FLIPS
    assert found[0] == found[1]
    assert found[0].p_value != found[2].p_value


def test_equal_evaluations_have_no_change() -> None:
    found = compare_rows(rows(0, 1, 1), rows(0, 1, 1), seed=0, where="")
    assert (found.accuracy.p_value, found.reward.p_value, found.changed) == (1.0, 1.0, ())


def test_correctness_of_a_row_is_its_own_or_that_of_its_breakdown() -> None:
    before = [{**row, "correct": True} for row in rows(0.9, 0.9)]
    after = [{**row, "breakdown": {"correctness": 0.0}} for row in rows(1.0, 1.0)]
    assert compare_rows(before, after, seed=0, where="").accuracy.interval.estimate == -1.0


def test_prompts_that_one_did_not_score_are_in_no_pair() -> None:
    found = compare_rows(rows(None, 0, 1), rows(1, 0, 1), seed=0, where="")
    assert (found.num_pairs, found.num_unpaired) == (2, 1)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (rows(0, 1), rows(0, 1, 1), "p:2 is missing"),
        (rows(0, 1, 1), rows(0, 1), "p:2 is not among the data"),
        (rows(0, 1), rows(0, 1, label="2"), "p:0 has the labels '1' and '2'"),
        (rows(0, None), rows(0, 1), "1 prompts have a reward in both"),
    ],
)
def test_other_prompts_are_not_compared(before: Any, after: Any, told: str) -> None:
    with pytest.raises(DataError) as caught:
        compare_rows(before, after, seed=0, where="out.jsonl")
    assert caught.value.problem.what == told
