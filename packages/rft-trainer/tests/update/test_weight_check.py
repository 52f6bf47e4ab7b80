"""The sample of weights by which the size of an update is seen; the checksums are tested with whole runs.

See tests/invariants/test_guarded_steps.py for those.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rft_trainer.update.weight_check import SAMPLED_NUMBERS, SAMPLED_TENSORS, WeightSample, relative_change


def test_a_change_is_measured_over_the_size_of_the_weights() -> None:
    model = nn.Linear(3, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(2.0)
    sample = WeightSample(model)
    before = sample.numbers()
    assert relative_change(before, sample.numbers()) == 0.0
    with torch.no_grad():
        model.weight.add_(0.5)
    assert relative_change(before, sample.numbers()) == pytest.approx(0.25)


def test_large_models_are_sampled_all_over_and_frozen_tensors_are_not() -> None:
    layers = [nn.Linear(100, 100) for _ in range(30)]
    model = nn.Sequential(*layers)
    for layer in layers[:10]:
        layer.requires_grad_(False)
    numbers = WeightSample(model).numbers()
    assert numbers is not None
    assert len(numbers) <= SAMPLED_TENSORS * SAMPLED_NUMBERS
    sample = WeightSample(model)
    before = sample.numbers()
    with torch.no_grad():
        for layer in layers[:10]:
            layer.weight.add_(1.0)
    assert relative_change(before, sample.numbers()) == 0.0
    with torch.no_grad():
        for layer in layers[10:]:
            layer.weight[-1].add_(1.0)  # the last row alone
    assert (relative_change(before, sample.numbers()) or 0.0) > 0


def test_without_weights_that_are_trained_here_nothing_is_said() -> None:
    model = nn.Linear(2, 2)
    model.requires_grad_(False)
    assert WeightSample(model).numbers() is None
    assert WeightSample(object()).numbers() is None
    assert relative_change(None, None) is None
    assert relative_change(torch.zeros(2), torch.ones(2)) is None
