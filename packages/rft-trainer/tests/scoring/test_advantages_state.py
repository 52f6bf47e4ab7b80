"""What an estimator keeps between steps: the running scale of rewards and the controlled coefficients."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rft_algos.algorithms import components
from rft_algos.algorithms.published import Grpo, PolicyAlgorithm
from rft_algos.schedules.controllers import AdaptiveKl, EntropyTarget
from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup
from rft_trainer.records.scores import RewardStatus
from rft_trainer.scoring.advantages import AdvantageEstimator, PolicyScores, RewardShapingConfig

RETURNS = Grpo(advantage=components.Returns(), kl_place="none", kl_coef=0.0)
"""The advantage of a response is its reward."""
WITH_KL = Grpo(kl_place="loss", kl_coef=0.25, entropy_coef=0.5)
WITH_DRIFT = replace(WITH_KL, drift_coef=0.75)
KL = AdaptiveKl(0.1, target=2.0, horizon=100)
ENTROPY = EntropyTarget(0.2, target=1.0, step=0.0625)


def groups(*rewards: float) -> list[RolloutGroup]:
    rollouts = tuple(
        Rollout("p", i, (3,), (-1.0,), (0.0,), "stop", 0, "x", reward, RewardStatus.OK)
        for i, reward in enumerate(rewards)
    )
    return [RolloutGroup(Prompt("p", (1, 2), "p", None, "p"), 0, 0, rollouts)]


def estimator(
    record: PolicyAlgorithm = RETURNS, rules: dict[str, Any] | None = None, **more: Any
) -> AdvantageEstimator:
    return AdvantageEstimator(record, RewardShapingConfig(longest_response=4, **rules or {}), seed=0, **more)


def advantages(made: AdvantageEstimator, rewards: Sequence[float], reference: float | None = None) -> list[float]:
    rows = [(-1.0,)] * len(rewards)
    told = PolicyScores(rows, rows, () if reference is None else [(reference,)] * len(rewards))
    return [sample.advantage for sample in made(groups(*rewards), told, step=0)[0]]


def test_rewards_are_scaled_by_the_deviation_of_all_so_far() -> None:
    made = estimator(rules={"running_norm": True})
    assert advantages(made, [1.0, 3.0]) == pytest.approx([1 / math.sqrt(2), 3 / math.sqrt(2)])
    # 1, 3, 5, 7: mean 4, squared deviations 9 + 1 + 1 + 9
    assert advantages(made, [5.0, 7.0]) == pytest.approx([x / math.sqrt(20 / 3) for x in (5, 7)])
    assert made.state()["running"] == [4, pytest.approx(4.0), pytest.approx(20.0)]


def test_the_running_mean_is_taken_off_and_scores_are_bounded_where_asked() -> None:
    made = estimator(rules={"running_norm": True, "minus_mean": True})
    assert advantages(made, [1.0, 3.0, 5.0]) == pytest.approx([-1.0, 0.0, 1.0])
    bounded = estimator(rules={"running_norm": True, "minus_mean": True, "clip": 0.5})
    assert advantages(bounded, [1.0, 3.0, 5.0]) == pytest.approx([-0.5, 0.0, 0.5])
    assert advantages(estimator(), [1.0, 3.0]) == [1.0, 3.0]


def test_the_scale_goes_on_after_a_restart() -> None:
    made = estimator(rules={"running_norm": True})
    advantages(made, [1.0, 3.0])
    restored = estimator(rules={"running_norm": True})
    restored.load_state(json.loads(json.dumps(made.state())))
    assert advantages(restored, [5.0, 7.0]) == advantages(made, [5.0, 7.0])
    assert restored.state() == made.state()


def test_a_state_without_a_scale_or_controllers_changes_nothing() -> None:
    nothing = {"kl_coefficient": None, "entropy_coefficient": None, "running": None}
    assert estimator().state() == nothing
    made = estimator(WITH_KL, {"running_norm": True}, kl_controller=KL, entropy_controller=ENTROPY)
    before = made.state()
    made.load_state(nothing)
    assert made.state() == before == {"kl_coefficient": 0.1, "entropy_coefficient": 0.2, "running": [0, 0.0, 0.0]}
    plain = estimator(WITH_KL)
    plain.load_state({"kl_coefficient": 0.5, "entropy_coefficient": 0.6, "running": [2, 1.0, 1.0]})
    assert plain.state() == nothing
    assert (plain.coefficients().kl, plain.coefficients().entropy) == (0.25, 0.5)


def test_controlled_coefficients_go_on_after_a_restart() -> None:
    made = estimator(WITH_KL, kl_controller=KL, entropy_controller=ENTROPY)
    made.load_state({"kl_coefficient": 0.5, "entropy_coefficient": 0.75, "running": None})
    assert (made.coefficients().kl, made.coefficients().entropy) == (0.5, 0.75)
    # the target is the controller's still
    assert made.control({"kl/rollout": 2.0, "policy/entropy": 0.5}, 10) == {
        "kl/coefficient": 0.5,
        "policy/entropy_coefficient": 0.8125,
    }


def coefficients(made: AdvantageEstimator) -> tuple[float, float, float]:
    found = made.coefficients()
    return found.kl, found.drift, found.entropy


def test_coefficients_are_the_algorithms_until_something_controls_them() -> None:
    assert coefficients(estimator(WITH_KL)) == (0.25, 0.0, 0.5)
    assert coefficients(estimator(WITH_DRIFT)) == (0.25, 0.75, 0.5)
    assert coefficients(estimator(WITH_KL, kl_controller=KL)) == (0.1, 0.0, 0.5)
    assert coefficients(estimator(WITH_KL, entropy_controller=ENTROPY)) == (0.25, 0.0, 0.2)


def test_a_controller_has_the_drift_where_there_is_one() -> None:
    assert coefficients(estimator(WITH_DRIFT, kl_controller=KL)) == (0.25, 0.1, 0.5)


def test_the_divergence_from_the_reference_moves_the_coefficient() -> None:
    made = estimator(WITH_KL, kl_controller=KL)
    # half above the target is bounded to 0.2, times 10 of 100 samples
    told = made.control({"kl/rollout": 3.0, "policy/kl": 0.0, "policy/entropy": 0.0}, 10)
    assert told == {"kl/coefficient": pytest.approx(0.1 * 1.02)}
    assert made.coefficients().kl == pytest.approx(0.1 * 1.02)


def test_a_drift_follows_the_divergence_from_the_start_of_the_step() -> None:
    made = estimator(WITH_DRIFT, kl_controller=KL)
    assert made.control({"kl/rollout": 2.0, "policy/kl": 0.0}, 50) == {"kl/coefficient": pytest.approx(0.1 * 0.9)}
    assert made.coefficients().drift == pytest.approx(0.1 * 0.9)


def test_the_entropy_moves_its_coefficient() -> None:
    made = estimator(WITH_KL, entropy_controller=ENTROPY)
    assert made.control({"policy/entropy": 0.5, "kl/rollout": 1.0}, 10) == {
        "policy/entropy_coefficient": pytest.approx(0.2625)
    }
    assert made.coefficients().entropy == pytest.approx(0.2625)


@pytest.mark.parametrize("metrics", [{}, {"kl/rollout": None, "policy/entropy": "nan"}])
def test_without_a_measurement_the_coefficients_stay(metrics: dict[str, object]) -> None:
    made = estimator(WITH_KL, kl_controller=KL, entropy_controller=ENTROPY)
    assert made.control(metrics, 10) == {}
    assert coefficients(made) == (0.1, 0.0, 0.2)


def test_a_penalty_in_the_reward_has_the_controlled_coefficient() -> None:
    record = replace(RETURNS, kl_place="reward", kl_coef=0.25, kl_estimator="k1")
    # a log-ratio of 2 to the reference
    assert advantages(estimator(record), [1.0], reference=-3.0) == pytest.approx([1 - 0.25 * 2])
    made = estimator(record, kl_controller=KL)
    assert advantages(made, [1.0], reference=-3.0) == pytest.approx([1 - 0.1 * 2])
    made.control({"kl/rollout": 3.0}, 100)
    assert advantages(made, [1.0], reference=-3.0) == pytest.approx([1 - 0.12 * 2])
