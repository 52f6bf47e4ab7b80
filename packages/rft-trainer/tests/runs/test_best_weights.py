"""The best weights so far: kept as copies, put back in place, stored and restored."""

from __future__ import annotations

import pytest
import torch

from rft_core.errors import CheckpointError
from rft_trainer.runs.best_weights import BestWeights


def weights() -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.full((2,), value)) for name, value in (("a", 1.0), ("b", 2.0))}


def values(tensors: dict[str, torch.nn.Parameter] | dict[str, torch.Tensor]) -> dict[str, float]:
    assert all(len(set(tensor.tolist())) == 1 for tensor in tensors.values())
    return {name: tensor[0].item() for name, tensor in tensors.items()}


def change(parameters: dict[str, torch.nn.Parameter], value: float) -> None:
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(value)


def test_what_was_kept_is_put_back_into_the_same_parameters() -> None:
    parameters = weights()
    before = dict(parameters)
    best = BestWeights(parameters.items())
    change(parameters, 7.0)
    best.put_back()
    assert values(parameters) == {"a": 7.0, "b": 7.0}, "nothing was kept yet"
    best.keep()
    change(parameters, 8.0)
    best.put_back()
    assert values(parameters) == {"a": 7.0, "b": 7.0}
    assert all(parameters[name] is before[name] for name in before)
    assert all(parameter.requires_grad for parameter in parameters.values())


def test_a_checkpoint_has_the_kept_values_or_the_present_ones() -> None:
    parameters = weights()
    best = BestWeights(parameters.items())
    first = best.checkpoint_tensors()
    assert values(first) == {"a": 1.0, "b": 2.0}
    best.keep()
    change(parameters, 9.0)
    assert values(best.checkpoint_tensors()) == {"a": 1.0, "b": 2.0}
    assert not any(tensor.requires_grad for tensor in (*first.values(), *best.checkpoint_tensors().values()))
    again = BestWeights(parameters.items())
    stored = {name: tensor.clone() for name, tensor in best.checkpoint_tensors().items()}
    again.load_state_tensors(stored)
    for tensor in stored.values():
        tensor.fill_(5.0)
    again.put_back()
    assert values(parameters) == {"a": 1.0, "b": 2.0}, "a copy of what was loaded"


@pytest.mark.parametrize("stored", [{"a": 2}, {"a": 2, "b": 2, "c": 2}, {"a": 2, "b": 3}, {}, {"a": 2, "c": 2}])
def test_weights_of_another_model_are_refused(stored: dict[str, int]) -> None:
    best = BestWeights(weights().items())
    with pytest.raises(CheckpointError) as caught:
        best.load_state_tensors({name: torch.zeros(size) for name, size in stored.items()})
    assert caught.value.problem.code == "checkpoint.best_weights"
