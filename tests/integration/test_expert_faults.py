"""Experts of transformers that stop being finite are named by the trace of a refused step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from rft_trainer.update.fault_trace import _First, _watched


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_the_expert_inside_a_grouped_product_is_named(implementation: str) -> None:
    config = Qwen3MoeConfig(hidden_size=16, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2)
    config._experts_implementation = implementation
    torch.manual_seed(0)
    block = Qwen3MoeSparseMoeBlock(config)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
        block.experts.down_proj[4] = float("inf")
    first = _First("")
    with _watched(nn.ModuleDict({"mlp": block}), first):
        block(torch.randn(1, 32, 16))
    assert first.stage == "output of mlp.experts, expert 4"
