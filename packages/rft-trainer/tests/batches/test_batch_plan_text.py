"""The arithmetic of a plan as a user reads it: every line, every note, and where a note begins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rft_core.errors import OptionsError
from rft_trainer.batches.batch_plan import BatchSizes, is_accepted, plan_batches, single_changes


def sizes(prompts: int, n: int, train: int, **more: Any) -> BatchSizes:
    return BatchSizes(rollout_batch_size=prompts, n_samples_per_prompt=n, train_batch_size=train, **more)


def problem_of(num_prompts: int, settings: BatchSizes) -> Any:
    with pytest.raises(OptionsError) as caught:
        plan_batches(num_prompts, settings)
    return caught.value.problem


def test_what_is_not_set_is_one() -> None:
    plain = sizes(4, 2, 8)
    assert plain == sizes(
        4,
        2,
        8,
        micro_train_batch_size=1,
        micro_rollout_batch_size=1,
        max_epochs=1,
        num_episodes=1,
        world_size=1,
        max_samples=None,
        group_estimator=False,
    )
    assert plan_batches(4, sizes(4, 1, 4)).total_steps == 1, "nothing compares samples unless that is said"


def test_a_plan_of_one_update_a_rollout() -> None:
    assert plan_batches(8, sizes(4, 2, 8)).derivation() == [
        "8 prompts x 2 samples = 16 samples an episode",
        "rollouts of 4 x 2 = 8 samples -> 2 rollouts",
        "8 samples = 1 update of 8 a rollout -> 2 optimizer steps an episode",
        "2 optimizer steps an episode x 1 episodes = 2 optimizer steps, 16 samples",
        "1 rank: at most 8 samples an update in forwards of 1 (8), 8 a rollout in forwards of 1 (8)",
    ]


def test_a_plan_of_uneven_updates_passes_episodes_and_ranks() -> None:
    made = plan_batches(
        10,
        sizes(
            4,
            2,
            3,
            max_epochs=2,
            num_episodes=3,
            world_size=2,
            micro_train_batch_size=2,
            micro_rollout_batch_size=3,
        ),
    )
    assert made.derivation() == [
        "10 prompts x 2 samples = 20 samples an episode",
        "rollouts of 4 x 2 = 8 samples -> 3 rollouts (the last of 2 prompts = 4 samples)",
        "8 samples = 3 updates of 3 (the last of 2) a rollout x 2 passes -> 16 optimizer steps an episode",
        "16 optimizer steps an episode x 3 episodes = 48 optimizer steps, 60 samples",
        "2 ranks: at most 2 samples an update in forwards of 2 (1), 4 a rollout in forwards of 3 (2)",
        "an update of 1 sample leaves 1 rank without one",
    ]


def test_a_plan_that_collects_rollouts_for_an_update() -> None:
    made = plan_batches(9, sizes(2, 3, 12, max_epochs=3))
    assert made.derivation()[2] == "2 rollouts of 6 = 1 update of 12 x 3 passes -> 9 optimizer steps an episode"
    assert made.derivation()[1] == "rollouts of 2 x 3 = 6 samples -> 5 rollouts (the last of 1 prompts = 3 samples)"
    assert made.collection_size == 12
    assert made.smallest_update == 3
    assert [update.num_samples for update in made.updates() if update.pass_number == 0] == [12, 12, 3]


def test_notes_begin_where_something_is_partial() -> None:
    fits = sizes(4, 2, 8, world_size=8, micro_train_batch_size=1, max_samples=4)
    assert plan_batches(4, fits).notes() == []
    assert plan_batches(5, fits).notes() == ["max_samples: the first 4 of 5 prompts are used"]
    assert plan_batches(4, replace(fits, world_size=9)).notes() == ["an update of 8 samples leaves 1 rank without one"]
    # two ranks have four samples each of an update
    two = replace(fits, world_size=2, micro_train_batch_size=4)
    assert plan_batches(4, two).notes() == []
    assert plan_batches(4, replace(two, micro_train_batch_size=5)).notes() == [
        "micro_train_batch_size = 5 is more than the 4 samples a rank has: one forward holds them all"
    ]
    small = plan_batches(3, sizes(4, 2, 8))
    assert small.notes() == [
        "an episode has 6 samples, fewer than train_batch_size = 8: each pass over it is one partial update with its "
        "own denominator"
    ]
    assert small.smallest_update == 6


def test_the_smallest_update_may_be_the_rest_of_a_full_rollout_or_of_the_last() -> None:
    assert plan_batches(8, sizes(4, 2, 5)).smallest_update == 3
    assert plan_batches(9, sizes(4, 2, 8)).smallest_update == 2
    assert plan_batches(8, sizes(4, 2, 4)).smallest_update == 4


@pytest.mark.parametrize("num_prompts", [0, -1])
def test_without_a_prompt_nothing_is_planned(num_prompts: int) -> None:
    problem = problem_of(num_prompts, sizes(1, 1, 1))
    assert (problem.code, problem.where) == ("batch.no_prompts", "--prompt_data")
    assert plan_batches(1, sizes(1, 1, 1)).total_steps == 1


def test_a_number_below_one_is_refused_with_the_one_change_that_mends_it() -> None:
    problem = problem_of(8, sizes(4, 2, 8, world_size=0))
    assert (problem.code, problem.where, problem.do) == ("batch.not_positive", "--world_size", "--world_size 1")
    assert problem.what == "world_size = 0: each must be at least 1"
    problem = problem_of(8, sizes(4, 2, 8, max_samples=-2))
    assert (problem.where, problem.do) == ("--max_samples", "--max_samples 1")


def test_several_numbers_below_one_are_mended_together() -> None:
    problem = problem_of(8, sizes(0, 0, 7, group_estimator=True))
    assert problem.what == "rollout_batch_size = 0, n_samples_per_prompt = 0: each must be at least 1"
    assert problem.where == "--rollout_batch_size, --n_samples_per_prompt"
    # 7 is no multiple of 1 x 2: of the numbers that could change besides, the first is named
    assert problem.do == "--rollout_batch_size 1 --n_samples_per_prompt 2 --train_batch_size 6"
    fitting = problem_of(8, sizes(0, 0, 6, group_estimator=True))
    assert fitting.do == "--rollout_batch_size 1 --n_samples_per_prompt 2"


def test_changes_of_one_number_are_the_nearest_that_fit_the_others() -> None:
    # a rollout has 12 samples: 14 is refused
    assert single_changes(sizes(4, 3, 14)) == {
        "train_batch_size": 12,
        "rollout_batch_size": 5,
        "n_samples_per_prompt": 4,
    }
    assert single_changes(sizes(4, 3, 12)) == {}
    # as far down as up: the smaller one
    assert single_changes(sizes(2, 1, 3)) == {
        "train_batch_size": 2,
        "rollout_batch_size": 1,
        "n_samples_per_prompt": 2,
    }
    with_groups = single_changes(sizes(2, 2, 5, group_estimator=True))
    assert with_groups == {"train_batch_size": 4, "rollout_batch_size": 3, "n_samples_per_prompt": 3}


def test_one_number_that_is_too_small_is_the_only_one_to_change() -> None:
    assert single_changes(sizes(4, 2, 8, max_epochs=0)) == {"max_epochs": 1}
    assert single_changes(sizes(4, 1, 4, group_estimator=True)) == {"n_samples_per_prompt": 2}
    assert single_changes(sizes(0, 2, 8)) == {"rollout_batch_size": 1}
    # besides the number of passes the train batch is wrong: no single change is enough
    assert single_changes(sizes(4, 2, 9, max_epochs=0)) == {}
    assert single_changes(sizes(0, 2, 8, max_epochs=0)) == {}


def test_a_train_batch_fits_where_it_is_at_most_a_rollout_or_a_multiple_of_it() -> None:
    assert [size for size in range(1, 20) if is_accepted(sizes(3, 2, size))] == [1, 2, 3, 4, 5, 6, 12, 18]
    assert not is_accepted(sizes(3, 2, 0))
    assert not is_accepted(sizes(3, 1, 3, group_estimator=True))


def test_a_train_batch_that_does_not_fit_is_refused_with_all_ways_out() -> None:
    problem = problem_of(8, sizes(4, 3, 14))
    assert (problem.code, problem.do) == ("batch.not_a_multiple", "--train_batch_size 12")
    assert "rollout_batch_size 5 or n_samples_per_prompt 4 would also work" in problem.why
    assert "train_batch_size 12 or" not in problem.why
    # one sample to compare comes first, where both rules are broken
    assert problem_of(8, sizes(4, 1, 6, group_estimator=True)).code == "batch.one_sample"


def test_numbers_beyond_the_integers_of_a_float_are_exact() -> None:
    many = 2**53 + 1
    made = plan_batches(many, sizes(2, 1, 2))
    assert made.rollouts_per_episode == 2**52 + 1
    assert made.last_rollout_prompts == 1
