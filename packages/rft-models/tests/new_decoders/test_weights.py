"""The first weights: a function of seed and name, smaller where they are added to the residual and in routers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rft_models.new_decoders.weights import draw_decoder_weights


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 64)
        self.o_proj = nn.Linear(64, 64, bias=False)
        self.gate = nn.Linear(64, 64, bias=False)
        self.norm = nn.RMSNorm(64)
        self.down_proj = nn.Parameter(torch.empty(4, 64, 64))  # of all experts


def test_each_weight_is_drawn_for_its_place() -> None:
    block = _Block()
    draw_decoder_weights(block, seed=1, std=0.5, num_layers=8)
    assert float(block.q_proj.weight.detach().std()) == pytest.approx(0.5, rel=0.05)
    for inner in (block.o_proj.weight, block.down_proj):
        assert float(inner.detach().std()) == pytest.approx(0.5 / math.sqrt(16), rel=0.05)
    assert float(block.gate.weight.detach().std()) == pytest.approx(0.01, rel=0.05)
    assert torch.equal(block.q_proj.bias, torch.zeros(64))
    assert torch.equal(block.norm.weight, torch.ones(64))


def test_weights_depend_on_the_seed_and_the_name_alone() -> None:
    drawn = [_Block() for _ in range(3)]
    for block, seed in zip(drawn, (1, 1, 2), strict=True):
        torch.randn(1)  # the global generator has no part in it
        draw_decoder_weights(block, seed=seed, std=0.02, num_layers=2)
    first, again, other = (block.q_proj.weight for block in drawn)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, drawn[0].o_proj.weight * 2)
