"""Weights of enumerated groups, by hand and against the gradient that they stand for."""

from __future__ import annotations

import pytest
import torch

from rft_algos.advantages.enumerated import probability_weighted


def test_two_sequences_by_hand() -> None:
    logprobs = torch.tensor([0.6, 0.2], dtype=torch.float64).log()
    found = probability_weighted(torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.int64), logprobs)
    assert found.tolist() == pytest.approx([0.375, -0.375])


def test_the_mean_over_a_group_is_the_gradient_of_the_restricted_reward() -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    groups = torch.tensor([3, 3, 3, 8, 8])
    chosen = torch.tensor([0, 4, 7, 4, 9])
    rewards = torch.tensor([1.0, 0.0, 0.25, -2.0, 3.0], dtype=torch.float64)
    logprobs = logits.log_softmax(0)[chosen]
    expected = torch.zeros((), dtype=torch.float64)
    sizes = torch.tensor([3.0, 3.0, 3.0, 2.0, 2.0])
    for group in (3, 8):
        here = groups == group
        expected = expected + (logprobs[here].softmax(0) * rewards[here]).sum()
    [wanted] = torch.autograd.grad(expected, logits, retain_graph=True)
    advantages = probability_weighted(rewards, groups, logprobs)
    [found] = torch.autograd.grad((advantages * logprobs / sizes).sum(), logits)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_equal_rewards_and_improbable_sequences() -> None:
    groups = torch.tensor([0, 0, 1, 1])
    rewards = torch.tensor([0.3, 0.3, 1.0, 0.0])
    found = probability_weighted(rewards, groups, torch.tensor([-1.0, -2.0, -2000.0, -2000.0]))
    assert found.tolist() == [0.0, 0.0, 0.5, -0.5]


def test_log_probs_of_another_number_are_refused() -> None:
    with pytest.raises(ValueError, match="log-probs"):
        probability_weighted(torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.zeros(3))
