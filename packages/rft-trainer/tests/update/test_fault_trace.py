"""The expert of a layer whose product stopped being finite is named, where one module computes all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rft_trainer.update.fault_trace import _First, _watched

TOKENS, WIDTH, EXPERTS = 6, 4, 5


class Experts(nn.Module):
    """All experts of a layer: a matrix each, and the weighted sum of a token's choices."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(EXPERTS, WIDTH, WIDTH))
        self.calls = 0

    def forward(self, states_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self.calls += 1
        products_TKH = torch.einsum("th,tkhi->tki", states_TH, self.weights[experts_TK])
        return (products_TKH * weights_TK[..., None]).sum(1)


class Layer(nn.Module):
    """The experts, as a layer calls them."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, states_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self.experts(states_TH, experts_TK, weights_TK)


def stage_of(layer: Layer, experts_TK: Tensor) -> str:
    first = _First("")
    weights_TK = torch.full(experts_TK.shape, 1 / experts_TK.shape[1])
    with _watched(layer, first):
        layer(torch.ones(len(experts_TK), WIDTH), experts_TK, weights_TK)
    return first.stage


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_the_expert_at_fault_is_named(value: float) -> None:
    experts = Experts()
    with torch.no_grad():
        experts.weights[3] = value  # of the largest, the sum alone is too large
    chosen = torch.tensor([[0, 1], [2, 4], [4, 3], [3, 1]])
    assert stage_of(Layer(experts), chosen) == "output of experts, expert 3"
    assert stage_of(Layer(experts), torch.tensor([[0, 1], [2, 4]])) == ""


def test_all_experts_of_a_token_that_are_at_fault_are_named() -> None:
    experts = Experts()
    with torch.no_grad():
        experts.weights[[1, 4]] = float("inf")
    assert stage_of(Layer(experts), torch.tensor([[0, 2], [4, 1]])) == "output of experts, experts 4 and 1"


def test_finite_values_cost_no_further_call_and_other_modules_name_no_expert() -> None:
    experts = Experts()
    assert stage_of(Layer(experts), torch.tensor([[0, 1]])) == ""
    assert experts.calls == 1
    plain = nn.Linear(2, 2)
    with torch.no_grad():
        plain.weight.fill_(float("nan"))
    first = _First("")
    with _watched(nn.Sequential(plain), first):
        plain(torch.ones(1, 2))
    assert first.stage == "output of 0"
