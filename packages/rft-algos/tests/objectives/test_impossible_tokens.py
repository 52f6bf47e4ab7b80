"""Log-probs of -inf, as truncated sampling leaves them: such a token is left out, by every algorithm alike."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rft_algos import surrogates
from rft_algos.algorithms.published import PUBLISHED, PolicyAlgorithm
from rft_algos.objectives import RolloutBatch, compute_advantages, policy_loss

D = torch.float64
INF = math.inf
IDS = torch.tensor([0, 0, 0, 1, 1, 1])
CURRENT = torch.tensor([-1.0, -2.0, -0.5, -1.5, -0.7, -2.5], dtype=D)
OLD = torch.tensor([-1.2, -1.9, -0.6, -1.4, -0.9, -2.4], dtype=D)


def loss_and_gradient(record: PolicyAlgorithm, current: Tensor, old: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    batch = RolloutBatch(
        rewards_N=torch.tensor([1.0, 0.0], dtype=D),
        group_ids_N=torch.tensor([0, 0]),
        loss_mask_T=torch.ones(6, dtype=torch.bool),
        segment_ids_T=IDS,
        old_logprobs_T=OLD,
        behaviour_logprobs_T=OLD,
        reference_logprobs_T=OLD,
        values_T=torch.zeros(6, dtype=D),
        greedy_rewards_N=torch.tensor([0.5, 0.5], dtype=D),
        components_NK=torch.tensor([[1.0, 0.0], [0.0, 0.5]], dtype=D),
        step_rewards_T=torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0], dtype=D),
        step_mask_T=torch.tensor([False, False, True, False, False, True]),
    )
    worth = compute_advantages(record, batch)
    leaf = current.clone().requires_grad_()
    output = policy_loss(
        record,
        logprobs_T=leaf,
        old_logprobs_T=old,
        reference_logprobs_T=OLD,
        behaviour_logprobs_T=OLD,
        advantages_T=worth.advantages_T,
        loss_mask_T=mask,
        segment_ids_T=IDS,
        entropy_T=None,
        # counted before anything is left out
        num_loss_tokens=6,
        num_sequences=2,
        selected_T=worth.selected_T,
    )
    output.loss.backward()
    assert leaf.grad is not None
    return output.loss.detach(), leaf.grad


@pytest.mark.parametrize("sides", ["both", "current", "old"])
@pytest.mark.parametrize("kind", PUBLISHED, ids=lambda kind: kind.name)
def test_it_is_left_out_and_denominators_stay(kind: type[PolicyAlgorithm], sides: str) -> None:
    record = kind(max_tokens=4) if kind.name == "dr_grpo" else kind()
    everywhere, current, old = torch.ones(6, dtype=torch.bool), CURRENT.clone(), OLD.clone()
    if sides != "old":
        current[1] = -INF
    if sides != "current":
        old[1] = -INF
    loss, gradient = loss_and_gradient(record, current, old, everywhere)
    assert bool(loss.isfinite())
    assert gradient[1] == 0
    if record.aggregation != "sequence_mean_token_mean":
        # the weights of a sequence's other tokens do not depend on its length
        expected, expected_gradient = loss_and_gradient(record, CURRENT, OLD, everywhere & (torch.arange(6) != 1))
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-15)


def test_hand_computed_grpo_counts_the_token_in_the_length() -> None:
    record = next(kind for kind in PUBLISHED if kind.name == "grpo")(kl_place="none")
    current, old = OLD.clone(), OLD.clone()
    current[1] = old[1] = -INF
    loss, gradient = loss_and_gradient(record, current, old, torch.ones(6, dtype=torch.bool))
    advantage = 0.5 / (math.sqrt(0.5) + 1e-6)
    # two of three tokens of the first sequence are left, each with a third of its weight
    assert float(loss) == pytest.approx(-advantage / 2 * 2 / 3 + advantage / 2)
    assert gradient.tolist() == pytest.approx([-advantage / 6, 0, -advantage / 6, *[advantage / 6] * 3])


def test_nan_is_a_fault_and_stays() -> None:
    record = next(kind for kind in PUBLISHED if kind.name == "grpo")()
    current = CURRENT.clone()
    current[1] = math.nan
    assert bool(loss_and_gradient(record, current, OLD, torch.ones(6, dtype=torch.bool))[0].isnan())


@pytest.mark.parametrize("logprob", [-INF, -1.0])
def test_surrogates_alone_are_finite(logprob: float) -> None:
    leaf = torch.tensor([logprob, -1.0], dtype=D).requires_grad_()
    old = torch.tensor([-1.0, -INF if logprob > -INF else -1.0], dtype=D)
    ones, mask, ids = torch.ones(2, dtype=D), torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    log_ratio = leaf - old
    losses = {
        "gspo_token": surrogates.gspo_token(log_ratio, ones, mask, ids),
        "gspo": surrogates.gspo(log_ratio, ones, mask, ids),
        "gmpo": surrogates.gmpo(log_ratio, ones, mask, ids),
        "cispo": surrogates.cispo(leaf, log_ratio, ones, None, 4.0),
        "ppo_clip": surrogates.ppo_clip(log_ratio, ones, 0.2, 0.2),
    }
    for name, loss in losses.items():
        assert bool(loss.isfinite().all()), name
        (gradient,) = torch.autograd.grad(loss.sum(), leaf, retain_graph=True)
        assert not bool(gradient.isnan().any()), name
