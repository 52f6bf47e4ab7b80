"""The batch arithmetic, against a run that is played through sample by sample."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_core.errors import OptionsError
from rft_trainer.batches.batch_plan import BatchPlan, BatchSizes, is_accepted, plan_batches, single_changes

SIZES = st.one_of(st.integers(1, 12), st.integers(1, 300), st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 256, 512]))
SETTINGS = st.builds(
    BatchSizes,
    rollout_batch_size=SIZES,
    n_samples_per_prompt=st.integers(1, 16),
    train_batch_size=SIZES,
    micro_train_batch_size=st.integers(1, 16),
    micro_rollout_batch_size=st.integers(1, 16),
    max_epochs=st.integers(1, 3),
    num_episodes=st.integers(1, 4),
    world_size=st.integers(1, 8),
    max_samples=st.one_of(st.none(), st.integers(1, 500)),
    group_estimator=st.booleans(),
)


def plan(num_prompts: int, given_ones: BatchSizes) -> BatchPlan:
    return plan_batches(num_prompts, given_ones)


def check_against_a_played_run(made: BatchPlan) -> None:
    """Each pass over an episode holds every (prompt, sample) exactly once, in updates of the allowed sizes."""
    s = made.settings
    updates = list(made.updates())
    assert len(updates) == made.steps_per_episode
    assert made.total_steps == made.steps_per_episode * s.num_episodes >= 1
    assert made.total_samples == made.num_prompts * s.n_samples_per_prompt * s.num_episodes
    sizes = made.rollout_sizes()
    assert sum(sizes) == made.num_prompts
    assert len(sizes) == made.rollouts_per_episode
    assert all(size == s.rollout_batch_size for size in sizes[:-1])
    assert 1 <= sizes[-1] == made.last_rollout_prompts <= s.rollout_batch_size
    firsts = [sum(sizes[:number]) * s.n_samples_per_prompt for number in range(len(sizes))] if len(sizes) < 400 else []
    for number in range(s.max_epochs if firsts else 0):
        seen: Counter[int] = Counter()
        for update in updates:
            if update.pass_number == number:
                assert 1 <= update.num_samples <= s.train_batch_size
                start = firsts[update.rollouts.start]
                seen.update(range(start + update.start, start + update.stop))
        assert seen == dict.fromkeys(range(made.samples_per_episode), 1)
    assert min(update.num_samples for update in updates) == made.smallest_update
    assert made.derivation()


def check_planned_or_refused(num: int, given_ones: BatchSizes) -> None:
    product = given_ones.rollout_batch_size * given_ones.n_samples_per_prompt
    size = given_ones.train_batch_size
    fine = (size <= product or size % product == 0) and not (
        given_ones.group_estimator and given_ones.n_samples_per_prompt == 1
    )
    if num and fine:
        made = plan(num, given_ones)
        assert made.settings == given_ones
        assert made.num_prompts == min(num, given_ones.max_samples or num)
        assert single_changes(given_ones) == {}
        if num * given_ones.n_samples_per_prompt <= 400:
            check_against_a_played_run(made)
        return
    with pytest.raises(OptionsError) as caught:
        plan(num, given_ones)
    if num == 0:
        assert caught.value.problem.code == "batch.no_prompts"
        return
    changes = single_changes(given_ones)
    text = caught.value.problem.as_text()
    assert changes
    for name, value in changes.items():
        assert is_accepted(replace(given_ones, **{name: value}))
        assert plan(num, replace(given_ones, **{name: value})).total_steps >= 1
        assert f"{name} {value}" in text


@given(st.integers(0, 300), SETTINGS)
@settings(max_examples=300, deadline=None)
def test_any_numbers_are_planned_exactly_or_refused_with_changes_that_work(num: int, given_ones: BatchSizes) -> None:
    check_planned_or_refused(num, given_ones)


def test_ten_thousand_random_plans_divide_by_nothing_and_correct_nothing_silently() -> None:
    draw = random.Random(1)
    for _ in range(10_000):
        sizes = [draw.choice((draw.randint(1, 12), draw.randint(1, 300), 2 ** draw.randint(0, 9))) for _ in range(2)]
        given_ones = BatchSizes(
            rollout_batch_size=sizes[0],
            n_samples_per_prompt=draw.randint(1, 16),
            train_batch_size=sizes[1],
            micro_train_batch_size=draw.randint(1, 16),
            micro_rollout_batch_size=draw.randint(1, 16),
            max_epochs=draw.randint(1, 3),
            num_episodes=draw.randint(1, 4),
            world_size=draw.randint(1, 8),
            max_samples=draw.choice((None, draw.randint(1, 500))),
            group_estimator=draw.random() < 0.5,
        )
        check_planned_or_refused(draw.randint(0, 300), given_ones)


@given(SETTINGS)
@settings(max_examples=300, deadline=None)
def test_a_suggested_change_is_the_smallest_for_its_number(given_ones: BatchSizes) -> None:
    for name, value in single_changes(given_ones).items():
        old = getattr(given_ones, name)
        for nearer in range(old - abs(value - old) + 1, old + abs(value - old)):
            assert nearer < 1 or not is_accepted(replace(given_ones, **{name: nearer}))


@given(SETTINGS, st.dictionaries(st.sampled_from(sorted(asdict(BatchSizes(1, 1, 1)))), st.integers(-3, 0), min_size=1))
@settings(max_examples=500, deadline=None)
def test_zero_and_negative_numbers_are_all_named_and_the_remedy_works(
    given_ones: BatchSizes, bad: dict[str, int]
) -> None:
    bad.pop("group_estimator", None)
    broken = replace(given_ones, **bad)
    if not bad:
        return
    with pytest.raises(OptionsError) as caught:
        plan(10, broken)
    problem = caught.value.problem
    assert all(f"{name} = {value}" in problem.what for name, value in bad.items())
    words = problem.do.split()
    mended = {flag.removeprefix("--"): int(value) for flag, value in zip(words[::2], words[1::2], strict=True)}
    assert is_accepted(replace(broken, **mended))


def test_the_guides_example_that_breaks_the_guides_rule_is_accepted() -> None:
    made = plan_batches(7473, BatchSizes(rollout_batch_size=64, n_samples_per_prompt=8, train_batch_size=256))
    assert (made.rollouts_per_episode, made.last_rollout_prompts) == (117, 49)
    assert (made.steps_per_episode, made.total_samples) == (116 * 2 + 2, 59_784)
    lines = made.derivation()
    assert lines[0] == "7,473 prompts x 8 samples = 59,784 samples an episode"
    assert lines[1] == ("rollouts of 64 x 8 = 512 samples -> 117 rollouts (the last of 49 prompts = 392 samples)")
    assert lines[2] == "512 samples = 2 updates of 256 a rollout -> 234 optimizer steps an episode"


def test_a_train_batch_larger_than_the_data_is_one_partial_update_and_said_so() -> None:
    made = plan_batches(60, BatchSizes(rollout_batch_size=64, n_samples_per_prompt=8, train_batch_size=512))
    assert made.total_steps == 1
    assert [update.num_samples for update in made.updates()] == [480]
    assert any("480 samples, fewer than train_batch_size = 512" in note for note in made.notes())


def test_a_train_batch_larger_than_a_rollout_collects_whole_rollouts() -> None:
    made = plan_batches(10, BatchSizes(rollout_batch_size=2, n_samples_per_prompt=4, train_batch_size=16, max_epochs=2))
    assert made.rollouts_per_update == 2
    assert [(list(u.rollouts), u.pass_number, u.num_samples) for u in made.updates()] == [
        ([0, 1], 0, 16),
        ([0, 1], 1, 16),
        ([2, 3], 0, 16),
        ([2, 3], 1, 16),
        ([4], 0, 8),
        ([4], 1, 8),
    ]


def test_an_update_that_does_not_take_whole_rollouts_is_refused_with_product_rule_and_changes() -> None:
    with pytest.raises(OptionsError) as caught:
        plan_batches(1000, BatchSizes(rollout_batch_size=64, n_samples_per_prompt=4, train_batch_size=500))
    problem = caught.value.problem
    assert "64 x 4 = 256" in problem.what
    assert "multiple of 256" in problem.why
    assert "rollout_batch_size 125 or n_samples_per_prompt 5" not in problem.why  # 500 % (64 x 5) is not 0
    assert "n_samples_per_prompt 8" in problem.why
    assert problem.do == "--train_batch_size 512"


def test_one_sample_a_prompt_is_refused_for_a_group_estimator_only() -> None:
    sizes = BatchSizes(rollout_batch_size=8, n_samples_per_prompt=1, train_batch_size=8)
    assert plan_batches(8, sizes).total_steps == 1
    with pytest.raises(OptionsError) as caught:
        plan_batches(8, replace(sizes, group_estimator=True))
    assert caught.value.problem.code == "batch.one_sample"
    assert caught.value.problem.do == "--n_samples_per_prompt 2"


def test_max_samples_takes_the_first_prompts_and_says_so() -> None:
    made = plan_batches(
        100, BatchSizes(rollout_batch_size=8, n_samples_per_prompt=2, train_batch_size=16, max_samples=20)
    )
    assert made.num_prompts == 20
    assert "max_samples: the first 20 of 100 prompts are used" in made.notes()
    assert (
        plan_batches(
            5, BatchSizes(rollout_batch_size=8, n_samples_per_prompt=2, train_batch_size=16, max_samples=20)
        ).num_prompts
        == 5
    )


def test_ranks_without_work_and_forwards_that_hold_everything_are_said() -> None:
    made = plan_batches(
        9,
        BatchSizes(
            rollout_batch_size=8, n_samples_per_prompt=2, train_batch_size=16, world_size=4, micro_train_batch_size=9
        ),
    )
    notes = " ".join(made.notes())
    assert "an update of 2 samples leaves 2 ranks without one" in notes
    assert "micro_train_batch_size = 9 is more than the 4 samples a rank has" in notes


def test_collected_samples_are_cut_in_order_with_a_smaller_last_update() -> None:
    made = plan_batches(9, BatchSizes(rollout_batch_size=8, n_samples_per_prompt=2, train_batch_size=6))
    assert made.cut(16) == [range(0, 6), range(6, 12), range(12, 16)]
    assert made.cut(0) == []
