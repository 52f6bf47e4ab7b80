"""transformers' grouped product of experts, which training runs by default, beside a loop over tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeForCausalLM

EXPERTS, WIDTH, INNER, TOKENS = 5, 16, 24, 12


def experts(implementation: str) -> Qwen3MoeExperts:
    config = Qwen3MoeConfig(hidden_size=WIDTH, moe_intermediate_size=INNER, num_experts=EXPERTS)
    config._experts_implementation = implementation
    made = Qwen3MoeExperts(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made


def routes(top_k: int, *, without: int | None) -> tuple[Tensor, Tensor]:
    """([T, k] experts, [T, k] weights); no token goes to `without`."""
    generator = torch.Generator().manual_seed(top_k)
    scores = torch.randn(TOKENS, EXPERTS, generator=generator)
    if without is not None:
        scores[:, without] = -100
    weights, chosen = scores.softmax(-1).topk(top_k, dim=-1)
    return chosen, weights / weights.sum(-1, keepdim=True)


def naive(made: Qwen3MoeExperts, hidden_TD: Tensor, chosen_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
    """A token at a time, an expert at a time."""
    rows: list[Tensor] = []
    for token, hidden in enumerate(hidden_TD):
        row = torch.zeros_like(hidden)
        for expert, weight in zip(chosen_Tk[token].tolist(), weights_Tk[token], strict=True):
            gate, up = (made.gate_up_proj[expert] @ hidden).chunk(2)
            row = row + weight * (made.down_proj[expert] @ (F.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize(("top_k", "without"), [(1, None), (2, None), (5, None), (1, 2), (3, 2)])
def test_grouped_products_are_the_loop_in_value_and_gradient(top_k: int, without: int | None) -> None:
    chosen, weights = routes(top_k, without=without)
    hidden = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(9))
    found: list[list[Tensor]] = []
    for forward in (None, "eager", "grouped_mm"):
        made = experts(forward or "eager")
        inputs, given = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        output = made(inputs, chosen, given) if forward else naive(made, inputs, chosen, given)
        wanted = (inputs, given, made.gate_up_proj, made.down_proj)
        found.append([output, *torch.autograd.grad(output.sin().sum(), wanted)])
    for other in found[1:]:
        for tensor, expected in zip(other, found[0], strict=True):
            assert (tensor - expected).norm() <= 1e-5 * expected.norm()
    if without is not None:
        assert not found[2][3][without].any(), "an expert without tokens has a gradient of zero, and has one"


def test_training_takes_the_grouped_product() -> None:
    config = Qwen3MoeConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, num_experts=2
    )
    assert Qwen3MoeForCausalLM(config).config._experts_implementation == "grouped_mm"
