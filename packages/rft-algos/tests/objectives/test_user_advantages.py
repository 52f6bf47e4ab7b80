"""The algorithm's own advantages, and what of them stays where a person's take their place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rft_algos.algorithms.published import Grpo, Ppo
from rft_algos.objectives import RolloutBatch, algorithm_advantages, compute_advantages
from rft_algos.rewards.shaping import RunningMoments


def batch() -> RolloutBatch:
    """Two groups of two; sequences of 1, 2, 1 and 2 tokens, the last token masked."""
    segment_ids_T = torch.tensor([0, 1, 1, 2, 3, 3])
    return RolloutBatch(
        rewards_N=torch.tensor([1.0, 0.0, 0.5, 0.25], dtype=torch.float64),
        group_ids_N=torch.tensor([0, 0, 1, 1]),
        loss_mask_T=torch.tensor([True, True, True, True, True, False]),
        segment_ids_T=segment_ids_T,
        old_logprobs_T=torch.full((6,), -1.0, dtype=torch.float64),
        behaviour_logprobs_T=torch.full((6,), -1.0, dtype=torch.float64),
        reference_logprobs_T=torch.full((6,), -1.5, dtype=torch.float64),
        values_T=torch.tensor([0.5, 0.1, 0.2, 0.3, 0.4, 9.0], dtype=torch.float64),
    )


def test_they_are_those_of_the_algorithm_before_the_batch_is_normalised_and_clipped() -> None:
    # (1 - 0.5) / (sqrt(0.5) + 1e-6) = 0.70710578 of rewards 1 and 0; 0.125 / (0.17677670 + 1e-6) of 0.5 and 0.25
    own = algorithm_advantages(Grpo(kl_place="none", normalise_advantages=True, advantage_clip=0.1), batch())
    expected = [0.70710578, -0.70710578, -0.70710578, 0.70710278, -0.70710278, 0.0]
    assert own.advantages_T.tolist() == pytest.approx(expected, abs=1e-8)
    assert (own.returns_T, own.weights_T, own.selected_T, own.running, own.metrics) == (None, None, None, None, {})


RECORDS = {
    "plain": (Grpo(kl_place="none"), {}),
    "penalised": (Grpo(kl_place="reward", kl_estimator="k1"), {"kl_coef": 0.3}),
    "scaled": (
        Grpo(kl_place="none"),
        {"running": RunningMoments(4, 0.1, 2.0), "minus_mean": True, "score_clip": 0.4},
    ),
    "critic": (Ppo(), {}),
}


@pytest.mark.parametrize("name", RECORDS)
def test_given_back_as_a_persons_own_they_give_the_same_credit(name: str) -> None:
    record, given = RECORDS[name]
    b = batch()
    plain = compute_advantages(record, b, **given)  # type: ignore[arg-type]
    through = compute_advantages(
        record, b, score=lambda seen: algorithm_advantages(record, seen, **given).advantages_T, **given
    )  # type: ignore[arg-type]
    assert torch.equal(plain.advantages_T, through.advantages_T)
    assert plain.running == through.running
    assert (plain.returns_T is None) == (through.returns_T is None) == (name != "critic")
    if isinstance(plain.returns_T, Tensor):
        assert torch.equal(plain.returns_T, through.returns_T)  # type: ignore[arg-type]
    assert plain.metrics.keys() == through.metrics.keys()
    assert ("reward/score_clipped" in plain.metrics) == (name == "scaled")


def test_a_persons_own_leave_the_running_scale_and_the_returns_to_the_algorithm() -> None:
    b, zeros = batch(), torch.zeros(4)
    running = RunningMoments()
    own = algorithm_advantages(Ppo(), b, running=running)
    found = compute_advantages(Ppo(), b, score=lambda _: zeros, running=running)
    assert not bool(found.advantages_T.any())
    assert own.running is not None
    assert (found.running, own.running.count) == (own.running, 4)
    assert own.returns_T is not None
    assert torch.equal(found.returns_T, own.returns_T)  # type: ignore[arg-type]
    assert bool(own.returns_T.any())


def test_no_gradient_reaches_the_rewards() -> None:
    b = batch()
    b.rewards_N.requires_grad_()
    assert not algorithm_advantages(Grpo(kl_place="none"), b).advantages_T.requires_grad
