"""What a step's advantages carry besides themselves: weights of corrections and truncation, and the divergence."""

from __future__ import annotations

import math

import pytest
import torch

from rft_algos.algorithms import components
from rft_algos.algorithms.published import Grpo
from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup
from rft_trainer.records.scores import RewardStatus
from rft_trainer.scoring import advantages
from rft_trainer.scoring.advantages import AdvantageEstimator, PolicyScores, RewardShapingConfig


def rollout(number: int, behaviour: tuple[float, ...], reason: str) -> Rollout:
    return Rollout(
        prompt_id="p",
        sample_index=number,
        completion_ids=(3,) * len(behaviour),
        behaviour_logprobs=behaviour,
        log_kept_mass=(0.0,) * len(behaviour),
        finish_reason=reason,
        weight_version=0,
        response_text="x",
        reward=float(number),
        status=RewardStatus.OK,
    )


GROUPS = [
    RolloutGroup(
        Prompt("p", (1, 2), "p", None, "p"),
        0,
        0,
        (rollout(0, (-1.0, -1.5), "stop"), rollout(1, (-0.5, -2.0), "length")),
    )
]
OLD = [(-1.25, -1.0), (-0.75, -1.0)]
BEHAVIOUR = [one.behaviour_logprobs for one in GROUPS[0].rollouts]


def test_a_truncated_response_weighs_nothing_and_the_others_keep_the_correction_s_weights() -> None:
    record = Grpo(kl_place="none", correction=components.TokenTis(cap=1.5))
    shaping = RewardShapingConfig(longest_response=2, mask_truncated=True)
    samples, _ = AdvantageEstimator(record, shaping, seed=0)(GROUPS, PolicyScores(OLD, BEHAVIOUR), step=0)
    # min(pi_old / pi_behaviour, 1.5): exp(-0.25), and exp(0.5) = 1.65 is above the cap
    assert samples[0].token_weights == pytest.approx((math.exp(-0.25), 1.5))
    assert samples[1].token_weights == (0.0, 0.0)


def test_truncated_responses_are_masked_without_a_correction_too() -> None:
    shaping = RewardShapingConfig(longest_response=2, mask_truncated=True)
    estimator = AdvantageEstimator(Grpo(kl_place="none"), shaping, seed=0)
    samples, _ = estimator(GROUPS, PolicyScores(OLD, BEHAVIOUR), step=0)
    assert [sample.token_weights for sample in samples] == [(1.0, 1.0), (0.0, 0.0)]
    assert samples[1].advantage > 0 > samples[0].advantage, "they stay in their group"


def test_the_divergence_of_rollouts_is_that_of_the_policy_from_the_reference() -> None:
    reference = [(-2.25, -1.0), (-0.75, -1.5)]
    estimator = AdvantageEstimator(Grpo(kl_coef=0.1), RewardShapingConfig(longest_response=2), seed=0)
    _, metrics = estimator(GROUPS, PolicyScores(OLD, BEHAVIOUR, reference), step=0)
    total, number = metrics["kl/rollout"]
    # x = log pi - log pi_ref is 1, 0, 0, 0.5; each token counts exp(-x) - 1 + x
    assert float(total) == pytest.approx((math.exp(-1.0) - 1 + 1) + (math.exp(-0.5) - 1 + 0.5))
    assert float(number) == 4


def test_a_teacher_adds_its_log_prob_above_the_policy_s_to_every_token_less_the_mean_of_other_responses() -> None:
    teacher = [(-0.25, -1.5), (-0.75, -0.5)]
    shaping = RewardShapingConfig(longest_response=2)
    plain, _ = AdvantageEstimator(Grpo(kl_place="none"), shaping, seed=0)(GROUPS, PolicyScores(OLD, BEHAVIOUR), step=0)
    scores = PolicyScores(OLD, BEHAVIOUR, teacher=teacher)
    taught, metrics = AdvantageEstimator(Grpo(kl_place="none"), shaping, seed=0, teacher_coef=2.0)(
        GROUPS, scores, step=0
    )
    above = [[t - o for t, o in zip(*rows, strict=True)] for rows in zip(teacher, OLD, strict=True)]
    for before, after, own, other in zip(plain, taught, above, reversed(above), strict=True):
        expected = [before.advantage + 2 * (value - sum(other) / 2) for value in own]
        assert list(after.token_advantages) == pytest.approx(expected)
    total, number = metrics["kl/teacher"]
    assert (float(total), float(number)) == pytest.approx((-(1.0 - 0.5 + 0.0 + 0.5), 4))


def test_a_segment_has_one_number_where_all_its_loss_tokens_have_it() -> None:
    nan = math.nan
    rows = [
        ([0.5, 0.5, 9.0], [True, True, False], 0.5, True),
        ([9.0, -1.0, 2.0], [False, True, True], -1.0, False),
        ([nan, nan], [True, True], nan, False),
        ([nan], [True], nan, True),
        ([0.0, -0.0], [True, True], 0.0, True),
        ([3.0], [False], 0.0, True),
        ([], [], 0.0, True),
    ]
    ids = [index for index, (values, *_) in enumerate(rows) for _ in values]
    values_T = torch.tensor([value for values, *_ in rows for value in values], dtype=torch.float64)
    mask_T = torch.tensor([kept for _, mask, *_ in rows for kept in mask])
    first_N, same_N = advantages._one_number(values_T, torch.tensor(ids), mask_T, len(rows))
    assert first_N.tolist() == pytest.approx([first for *_, first, _ in rows], nan_ok=True)
    assert same_N.tolist() == [same for *_, same in rows]
