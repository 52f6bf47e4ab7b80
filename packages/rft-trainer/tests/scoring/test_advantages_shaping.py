"""From rewards to advantages: shaping for length, parts of the reward, steps, baselines, and a person's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_algos.algorithms import components
from rft_algos.algorithms.published import Grpo, PolicyAlgorithm
from rft_algos.objectives import RolloutBatch
from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup, TrainingSample
from rft_trainer.records.scores import RewardStatus
from rft_trainer.records.turns import Turn
from rft_trainer.scoring.advantages import (
    AdvantageEstimator,
    PolicyScores,
    RewardShapingConfig,
    is_correct,
    parse_component_weights,
)

CENTRED = Grpo(advantage=components.GroupCentred(), kl_place="none", kl_coef=0.0)
"""The advantage is the reward less the mean of the group."""


def rollout(number: int, length: int, reward: float, **more: Any) -> Rollout:
    row = (-1.0 - 0.125 * number,) * length
    made = Rollout("p", number, (3,) * length, row, (0.0,) * length, "stop", 0, "x", reward, RewardStatus.OK)
    return replace(made, **more)


def group(*rollouts: Rollout, position: int = 0, baseline: float | None = None) -> RolloutGroup:
    return RolloutGroup(Prompt("p", (1, 2), "p", None, "p"), 0, position, rollouts, baseline_reward=baseline)


def scores_of(groups: Sequence[RolloutGroup], **more: Any) -> PolicyScores:
    rows = [one.behaviour_logprobs for each in groups for one in each.rollouts]
    return PolicyScores(rows, rows, **more)


def estimated(
    groups: Sequence[RolloutGroup], record: PolicyAlgorithm = CENTRED, step: int = 0, **rules: Any
) -> tuple[list[TrainingSample], dict[str, tuple[float, float]]]:
    shaping = RewardShapingConfig(longest_response=4, **rules)
    samples, metrics = AdvantageEstimator(record, shaping, seed=0)(groups, scores_of(groups), step=step)
    return samples, {name: (float(total), float(number)) for name, (total, number) in metrics.items()}


def advantages(groups: Sequence[RolloutGroup], record: PolicyAlgorithm = CENTRED, **rules: Any) -> list[float]:
    return [sample.advantage for sample in estimated(groups, record, **rules)[0]]


THREE = [group(rollout(0, 2, 1.0), rollout(1, 3, 0.0), rollout(2, 4, 2.0))]


def test_rewards_are_as_they_are_without_rules() -> None:
    samples, metrics = estimated(THREE)
    assert [sample.advantage for sample in samples] == pytest.approx([0.0, -1.0, 1.0])
    assert [sample.token_advantages for sample in samples] == [(), (), ()]
    assert [sample.token_weights for sample in samples] == [(), (), ()]
    assert [sample.returns for sample in samples] == [(), (), ()]
    assert [sample.old_values for sample in samples] == [(), (), ()]
    assert [sample.reference_logprobs for sample in samples] == [(), (), ()]
    assert [sample.old_logprobs for sample in samples] == [one.behaviour_logprobs for one in THREE[0].rollouts]
    assert metrics == {}


def test_responses_near_the_limit_are_penalised_before_groups_are_compared() -> None:
    # over the last two of four tokens: 0 at two, -1/2 at three, -1 at four
    samples, metrics = estimated(THREE, overlong_buffer=2)
    assert [sample.advantage for sample in samples] == pytest.approx([0.5, -1.0, 0.5])  # of 1, -0.5, 1
    assert metrics == {"reward/overlong_penalty": (-1.5, 3.0)}
    _, metrics = estimated(THREE, overlong_buffer=2, overlong_factor=0.5)
    assert metrics == {"reward/overlong_penalty": (-0.75, 3.0)}


def test_a_length_term_favours_the_shorter_of_correct_responses() -> None:
    samples, metrics = estimated(THREE, length_penalty=True)
    # 1/2 for the shortest, 0 in the middle, -1/2 for the longest, of which the first and last are correct
    assert [sample.advantage for sample in samples] == pytest.approx([0.5, -1.0, 0.5])  # of 1.5, 0, 1.5
    assert metrics == {"reward/length_term": (0.0, 3.0)}


def test_both_penalties_are_added_and_correctness_is_that_of_the_raw_reward() -> None:
    _, metrics = estimated(THREE, length_penalty=True, overlong_buffer=2, overlong_factor=4.0)
    assert metrics == {"reward/overlong_penalty": (-6.0, 3.0), "reward/length_term": (0.0, 3.0)}
    # of 1.5, -2 and -2.5
    assert advantages(THREE, length_penalty=True, overlong_buffer=2, overlong_factor=4.0) == pytest.approx(
        [2.5, -1.0, -1.5]
    )


def test_lengths_are_those_of_sampled_tokens() -> None:
    turns = (Turn(True, 1, "a"), Turn(False, 2, "o"), Turn(True, 1, "b"))
    groups = [group(rollout(0, 4, 1.0, turns=turns), rollout(1, 4, 1.0))]
    assert estimated(groups, overlong_buffer=2)[1] == {"reward/overlong_penalty": (-1.0, 2.0)}


PARTS = [
    group(
        rollout(0, 2, 9.0, breakdown={"b": 1.0, "a": 2.0}),
        rollout(1, 2, 9.0, breakdown={"a": 4.0}),
        rollout(2, 2, 9.0, breakdown={"b": 3.0, "c": 50.0}),
    )
]


def test_weighted_parts_take_the_place_of_the_reward() -> None:
    # 2 * a + b: 5, 8, 3; a part that is missing counts 0, and one without a weight is left out
    found = advantages(PARTS, component_weights={"b": 1.0, "a": 2.0})
    assert found == pytest.approx([5 - 16 / 3, 8 - 16 / 3, 3 - 16 / 3])


def test_an_advantage_of_parts_sees_each_with_its_weight() -> None:
    record = Grpo(advantage=components.Gdpo(over_batch=False, epsilon=1e-9), kl_place="none", kl_coef=0.0)
    two = [group(rollout(0, 2, 9.0, breakdown={"b": 1.0, "a": 2.0}), rollout(1, 2, 9.0, breakdown={"a": 4.0}))]
    half = math.sqrt(0.5)
    # of each part the first is half a deviation above or below: b is above, a below
    assert advantages(two, record) == pytest.approx([0.0, 0.0], abs=1e-6)
    assert advantages(two, record, component_weights={"a": 1.0, "b": 3.0}) == pytest.approx(
        [2 * half, -2 * half], abs=1e-6
    )
    assert advantages(two, record, component_weights={"a": 3.0}) == pytest.approx([-3 * half, 3 * half], abs=1e-6)


def test_a_part_without_a_weight_weighs_one() -> None:
    record = Grpo(advantage=components.Gdpo(over_batch=False, epsilon=1e-9), kl_place="none", kl_coef=0.0)
    two = [group(rollout(0, 2, 9.0, breakdown={"a": 2.0}), rollout(1, 2, 9.0, breakdown={"a": 4.0}))]
    assert advantages(two, record) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-6)


BIG = 2.0**24
"""One more than this is no float32."""


def test_log_probs_and_rewards_of_steps_and_turns_keep_the_digits_that_they_have() -> None:
    groups = [group(rollout(0, 1, 1.0), rollout(1, 1, 0.0))]
    record = replace(CENTRED, correction=components.TokenTis(cap=9.0))
    estimator = AdvantageEstimator(record, RewardShapingConfig(longest_response=4), seed=0)
    samples, _ = estimator(groups, PolicyScores([(-BIG - 1,), (0.0,)], [(-BIG - 2,), (0.0,)]), step=0)
    assert samples[0].token_weights == pytest.approx((math.e,))
    of_steps = Grpo(advantage=components.ProcessGroupNorm(epsilon=1e-9), kl_place="none", kl_coef=0.0)
    near = [group(rollout(0, 1, 9.0, steps=((0, BIG + 1),)), rollout(1, 1, 9.0, steps=((0, BIG),)))]
    assert advantages(near, of_steps) == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], abs=1e-6)
    of_turns = Grpo(advantage=components.Returns(), kl_place="none", kl_coef=0.0)
    turns = (Turn(True, 1, "a", BIG + 1), Turn(True, 1, "b", 1.0))
    talk = [group(rollout(0, 2, BIG + 2, turns=turns, steps=((0, BIG + 1), (1, 1.0))))]
    assert estimated(talk, of_turns)[0][0].token_advantages == (BIG + 2, 1.0)


def test_parts_without_weights_leave_the_reward_as_it_is() -> None:
    seen: list[list[float]] = []

    def noting(batch: RolloutBatch) -> Tensor:
        seen.append(batch.rewards_N.tolist())
        return batch.rewards_N

    record = Grpo(advantage=components.Gdpo(), kl_place="none", kl_coef=0.0)
    for weights in (None, {"a": 0.5}):
        rules = RewardShapingConfig(longest_response=4, component_weights=weights)
        AdvantageEstimator(record, rules, seed=0, compute_advantages=noting)(PARTS, scores_of(PARTS), step=0)
    assert seen == [[9.0, 9.0, 9.0], [1.0, 2.0, 0.0]]


def test_a_reward_without_parts_is_one_part() -> None:
    record = Grpo(advantage=components.Gdpo(over_batch=False, epsilon=1e-9), kl_place="none", kl_coef=0.0)
    assert advantages([group(rollout(0, 2, 5.0), rollout(1, 2, 1.0))], record) == pytest.approx(
        [math.sqrt(0.5), -math.sqrt(0.5)], abs=1e-6
    )
    # in float32 the two would be equal
    near = [group(rollout(0, 2, 2.0**24 + 1), rollout(1, 2, 2.0**24))]
    assert advantages(near, record)[0] == pytest.approx(math.sqrt(0.5), abs=1e-6)


def test_rewards_of_steps_stand_at_their_ends_and_others_have_one_at_the_end() -> None:
    record = Grpo(advantage=components.ProcessGroupNorm(epsilon=1e-9), kl_place="none", kl_coef=0.0)
    groups = [group(rollout(0, 4, 9.0, steps=((1, 0.0), (3, 2.0))), rollout(1, 3, 1.0))]
    samples, _ = estimated(groups, record)
    # rewards 0, 2 and 1: mean 1, deviation 1; a token has the sum over the steps that are still to come
    assert samples[0].token_advantages == pytest.approx((0.0, 0.0, 1.0, 1.0), abs=1e-6)
    assert samples[1].token_advantages == ()
    assert samples[1].advantage == pytest.approx(0.0, abs=1e-6)
    # the one step of a response without steps has its shaped reward: 1 - 1/2
    samples, _ = estimated(groups, record, overlong_buffer=2, overlong_factor=1.0)
    mean = 2.5 / 3
    deviation = math.sqrt((mean**2 + (2 - mean) ** 2 + (0.5 - mean) ** 2) / 2)
    assert samples[1].advantage == pytest.approx((0.5 - mean) / deviation, abs=1e-6)
    assert samples[1].token_advantages == (), "at its last token, so that all tokens before have it too"


def test_the_greedy_response_is_the_baseline_of_its_group() -> None:
    record = Grpo(advantage=components.ReMax(), kl_place="none", kl_coef=0.0)
    groups = [
        group(rollout(0, 2, 1.0), rollout(1, 2, 0.0), baseline=0.25),
        group(rollout(0, 1, 3.0), position=1, baseline=2.0),
    ]
    assert advantages(groups, record) == pytest.approx([0.75, -0.25, 1.0])
    # as exact as the rewards are
    assert advantages([group(rollout(0, 2, 2.0**24 + 1), baseline=2.0**24 - 1)], record) == [2.0]
    # who does not compare with it does not need it
    assert advantages([group(rollout(0, 2, 1.0), rollout(1, 2, 0.0))]) == pytest.approx([0.5, -0.5])


def test_values_reference_and_entropy_reach_the_equations() -> None:
    groups = [group(rollout(0, 2, 1.0), rollout(1, 2, 0.0))]
    record = Grpo(
        advantage=components.Gae(gamma=1.0, lambd=0.0),
        kl_place="reward",
        kl_coef=0.5,
        kl_estimator="k1",
        high_entropy_fraction=0.5,
    )
    reference = [(-1.5, -1.0), (-1.125, -0.125)]
    told = scores_of(
        groups,
        reference=reference,
        values=[(0.25, 0.5), (0.125, 0.0)],
        entropy=[(0.1, 0.9), (0.8, 0.2)],
    )
    samples, metrics = AdvantageEstimator(record, RewardShapingConfig(longest_response=4), seed=0)(groups, told, step=0)
    # log-ratios to the reference 0.5, 0 and 0, -1, half of which is taken from the reward of each token
    # r_t + V_(t+1) - V_t: -0.25 + 0.5 - 0.25 and 1 - 0.5; 0 - 0.125 and 0.5
    assert samples[0].token_advantages == pytest.approx((0.0, 0.5))
    assert samples[1].token_advantages == pytest.approx((-0.125, 0.5))
    assert samples[0].returns == pytest.approx((0.25, 1.0))
    assert samples[0].old_values == (0.25, 0.5)
    assert [sample.token_weights for sample in samples] == [(0.0, 1.0), (1.0, 0.0)]
    assert [sample.reference_logprobs for sample in samples] == reference
    assert float(metrics["policy/high_entropy"][0]) == 2.0


def test_a_response_without_tokens_has_the_advantage_0() -> None:
    samples, _ = estimated([group(rollout(0, 0, 1.0), rollout(1, 2, 0.0))])
    assert [(sample.advantage, sample.token_advantages) for sample in samples] == [(0.0, ()), (-0.5, ())]


def test_a_persons_advantages_take_the_place_of_the_algorithms() -> None:
    def of_tokens(batch: RolloutBatch) -> Tensor:
        return torch.arange(batch.loss_mask_T.shape[0], dtype=torch.float64)

    groups = [group(rollout(0, 1, 1.0), rollout(1, 3, 0.0))]
    estimator = AdvantageEstimator(
        CENTRED, RewardShapingConfig(longest_response=4), seed=0, compute_advantages=of_tokens
    )
    samples, _ = estimator(groups, scores_of(groups), step=0)
    assert (samples[0].advantage, samples[0].token_advantages) == (0.0, ())
    assert (samples[1].advantage, samples[1].token_advantages) == (1.0, (1.0, 2.0, 3.0))


def test_the_algorithms_own_advantages_can_be_asked_for() -> None:
    asked: list[list[float]] = []
    rules = RewardShapingConfig(longest_response=4, clip=0.75)

    def doubled(batch: RolloutBatch) -> Tensor:
        own_T = estimator.own_advantages(batch)
        asked.append(own_T.tolist())
        return 2 * own_T

    record = replace(CENTRED, advantage_clip=0.1)
    estimator = AdvantageEstimator(record, rules, seed=0, compute_advantages=doubled)
    groups = [group(rollout(0, 1, 3.0), rollout(1, 2, 0.0))]
    samples, metrics = estimator(groups, scores_of(groups), step=0)
    # 1.5 and -1.5, bounded as scores; the bound on advantages comes after a person's own
    assert asked == [[0.75, -0.75, -0.75]]
    assert [sample.advantage for sample in samples] == [0.1, -0.1]
    assert float(metrics["reward/score_clipped"][0]) == 2.0


def test_the_effective_share_is_one_over_the_variance_of_the_weights() -> None:
    record = replace(CENTRED, correction=components.TokenTis(cap=9.0))
    groups = [group(rollout(0, 2, 1.0), rollout(1, 1, 0.0))]
    behaviour = [one.behaviour_logprobs for one in groups[0].rollouts]
    shifts = [(math.log(2.0), 0.0), (math.log(0.5),)]
    old = [tuple(x + d for x, d in zip(row, shift, strict=True)) for row, shift in zip(behaviour, shifts, strict=True)]
    estimator = AdvantageEstimator(record, RewardShapingConfig(longest_response=4), seed=0)
    _, metrics = estimator(groups, PolicyScores(old, behaviour), step=0)
    share = {name: float(total / number) for name, (total, number) in metrics.items()}
    # ratios 2, 1, 0.5 of tokens; 2 and 0.5 of sequences
    assert share["mismatch/effective_token_share"] == pytest.approx(3.5**2 / (5.25 * 3))
    assert share["mismatch/effective_sequence_share"] == pytest.approx(2.5**2 / (4.25 * 2))
    # one number a step, whatever the number of tokens
    assert float(metrics["mismatch/effective_token_share"][1]) == 1.0


def test_the_divergence_of_rollouts_leaves_observations_out() -> None:
    turns = (Turn(False, 1, "o"), Turn(True, 1, "a"))
    groups = [group(rollout(0, 2, 1.0, turns=turns), rollout(1, 1, 0.0))]
    told = scores_of(groups, reference=[(5.0, -1.0), (-2.125,)])
    estimator = AdvantageEstimator(CENTRED, RewardShapingConfig(longest_response=4), seed=0)
    _, metrics = estimator(groups, told, step=0)
    total, number = metrics["kl/rollout"]
    # log-ratios 0 and 1 at the two sampled tokens
    assert (float(total), float(number)) == (pytest.approx(math.exp(-1.0)), 2.0)
    assert "kl/rollout" not in estimator(groups, scores_of(groups), step=0)[1]


def selected(step: int, seed: int = 0) -> list[tuple[bool, ...]]:
    """Two of sixteen tokens, drawn."""
    surrogate = components.ClipCov(covariance_low=-1e9, covariance_high=1e9, fraction=0.125)
    groups = [group(rollout(0, 8, 1.0), rollout(1, 8, 0.0))]
    record = replace(CENTRED, surrogate=surrogate)
    estimator = AdvantageEstimator(record, RewardShapingConfig(longest_response=8), seed=seed)
    return [sample.selected for sample in estimator(groups, scores_of(groups), step=step)[0]]


def test_tokens_are_drawn_by_seed_and_step() -> None:
    first = selected(0)
    assert sum(sum(row) for row in first) == 2
    assert selected(0) == first
    assert len({tuple(selected(step)) for step in range(4)}) > 1
    assert len({tuple(selected(0, seed)) for seed in range(4)}) > 1


@pytest.mark.parametrize(
    ("reward", "breakdown", "correct"),
    [
        (1.0, {}, True),
        (2.0, {}, True),
        (0.99, {}, False),
        (None, {}, False),
        (0.0, {"correctness": 1.0}, True),
        (1.0, {"correctness": 0.5, "format": 1.0}, False),
        (0.9, {"math": 1.0, "math/correctness": 1.0, "format": 0.0}, True),
        (1.1, {"math": 0.0, "math/correctness": 0.0, "format": 1.1, "format/correctness": 1.0}, False),
    ],
)
def test_a_response_is_correct_by_its_part_or_its_reward(
    reward: float | None, breakdown: dict[str, float], correct: bool
) -> None:
    assert is_correct(replace(rollout(0, 1, 1.0), reward=reward, breakdown=breakdown)) is correct


def test_weights_of_parts_are_read_from_a_text() -> None:
    assert parse_component_weights("correctness=0.9, format =0.1") == {"correctness": 0.9, "format": 0.1}
    assert parse_component_weights("") is None
    with pytest.raises(ValueError, match="float"):
        parse_component_weights("correctness")


@pytest.mark.parametrize(("place", "expected"), [("loss", 2 * 1.0 / 1.5), ("reward", 2.0), ("none", None)])
def test_the_pull_of_the_divergence_is_measured_beside_the_rewards(place: Any, expected: float | None) -> None:
    record = replace(CENTRED, kl_place=place, kl_coef=2.0)
    groups = [group(rollout(0, 2, 1.0), rollout(1, 1, 0.0))]
    # log-ratios 1, 0 and 0; advantages 1/2, 1/2 and -1/2; rewards 1 and 0
    told = scores_of(groups, reference=[(-2.0, -1.0), (-1.125,)])
    estimator = AdvantageEstimator(record, RewardShapingConfig(longest_response=4), seed=0)
    _, metrics = estimator(groups, told, step=0)
    assert ("kl/pull" in metrics) == (expected is not None)
    if expected is not None:
        total, number = metrics["kl/pull"]
        assert float(total / number) == pytest.approx(expected)
    equal = [group(rollout(0, 2, 1.0), rollout(1, 1, 1.0))]
    assert "kl/pull" not in estimator(equal, scores_of(equal, reference=told.reference), step=0)[1]
