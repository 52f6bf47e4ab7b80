from __future__ import annotations

import math

import pytest
import torch

from rft_algos.input_checks import InputError
from rft_algos.losses.step_labels import step_cross_entropy

D = torch.float64


def test_it_is_the_cross_entropy_over_two_classes_whose_logits_differ_by_the_score() -> None:
    logits, labels = torch.tensor([1.5, -0.25, 3.0, 0.5], dtype=D), torch.tensor([1.0, 0.0, 0.0, 0.25], dtype=D)
    both = torch.log_softmax(torch.stack([-logits / 2, logits / 2], 1), 1)
    expected = -(1 - labels) * both[:, 0] - labels * both[:, 1]
    assert torch.allclose(step_cross_entropy(logits, labels), expected, rtol=1e-12)


def test_far_scores_neither_overflow_nor_round_to_nothing() -> None:
    losses = step_cross_entropy(torch.tensor([-200.0, 200.0, 0.0]), torch.tensor([1.0, 1.0, 1.0]))
    assert losses.tolist() == pytest.approx([200.0, 0.0, math.log(2)])


def test_the_gradient_is_probability_minus_label() -> None:
    logits = torch.tensor([0.3, -2.0], dtype=D, requires_grad=True)
    labels = torch.tensor([1.0, 0.4], dtype=D)
    step_cross_entropy(logits, labels).sum().backward()
    assert logits.grad is not None
    assert torch.allclose(logits.grad, logits.detach().sigmoid() - labels)


def test_another_number_of_labels_is_refused() -> None:
    with pytest.raises(InputError):
        step_cross_entropy(torch.zeros(3), torch.zeros(2))
