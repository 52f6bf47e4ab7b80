"""Additions: answers, counts, and nothing of the evaluation in training."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_core.errors import OptionsError
from rft_trainer.tasks.addition import Addition, all_problems, split


def test_prompts_and_answers_have_one_length_and_add_up() -> None:
    problems = all_problems()
    assert len({problem.prompt for problem in problems}) == 10_000
    assert (Addition(7, 45).prompt, Addition(7, 45).answer) == ("07+45=", "052")
    assert (Addition(99, 99).prompt, Addition(99, 99).answer) == ("99+99=", "198")
    for problem in problems:
        first, second = problem.prompt.removesuffix("=").split("+")
        assert len(problem.prompt) == 6
        assert len(problem.answer) == 3
        assert int(first) + int(second) == int(problem.answer)


@given(st.integers(0, 2**32), st.integers(1, 5049))
@settings(max_examples=20, deadline=None)
def test_no_held_out_problem_is_trained_on_in_either_order(seed: int, num_held_out: int) -> None:
    parts = split(seed, num_held_out)
    assert len(parts.held_out) == len(set(parts.held_out)) == num_held_out
    trained = {frozenset((problem.first, problem.second)) for problem in parts.train}
    held_out = {frozenset((problem.first, problem.second)) for problem in parts.held_out}
    assert len(held_out) == num_held_out
    assert not trained & held_out
    excluded = {p for pair in parts.held_out for p in (pair, pair.swapped)}
    assert set(parts.train) | excluded == set(all_problems())
    assert len(parts.train) == len(set(parts.train))


def test_the_default_split_has_at_least_8000_problems_and_depends_on_the_seed() -> None:
    parts = split(0)
    assert len(parts.held_out) == 500
    assert len(parts.train) + len(parts.held_out) >= 9_500
    assert split(0) == parts
    assert split(1).held_out != parts.held_out
    sums = [problem.first + problem.second for problem in parts.held_out]
    assert abs(sum(sums) / 500 - 99) < 7  # the mean of sums has a standard deviation of 1.8 here
    both_orders = sum(problem.first > problem.second for problem in parts.held_out)
    assert 190 < both_orders < 310


def test_rows_carry_ids_and_answers() -> None:
    parts = split(3, 10)
    rows = parts.held_out_rows()
    assert rows[0].prompt_id == f"arithmetic:{100 * parts.held_out[0].first + parts.held_out[0].second}"
    assert (rows[0].text, rows[0].label, rows[0].output) == (
        parts.held_out[0].prompt,
        parts.held_out[0].answer,
        parts.held_out[0].answer,
    )
    ids = [row.prompt_id for row in rows + [problem.as_row() for problem in parts.train]]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("num", [0, -1, 5050])
def test_a_held_out_set_that_leaves_nothing_is_refused(num: int) -> None:
    with pytest.raises(OptionsError):
        split(0, num)
