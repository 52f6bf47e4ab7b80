"""The family's classes: gate or none, and what they share with Qwen3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

from rft_models.own_decoder.modeling import FeedForward, RftDecoderConfig, RftDecoderForCausalLM

SIZES: dict[str, Any] = dict(
    vocab_size=20,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=24,
    max_position_embeddings=32,
)


def test_a_gated_decoder_without_dropout_is_qwen3() -> None:
    torch.manual_seed(0)
    reference = Qwen3ForCausalLM(Qwen3Config(**SIZES)).eval()
    own = RftDecoderForCausalLM(RftDecoderConfig(**SIZES)).eval()
    own.load_state_dict(reference.state_dict())
    tokens = torch.tensor([[3, 7, 1, 9]])
    torch.testing.assert_close(own(input_ids=tokens).logits, reference(input_ids=tokens).logits)


def test_without_a_gate_there_are_two_matrices_and_gelu() -> None:
    torch.manual_seed(0)
    part = FeedForward(RftDecoderConfig(**SIZES, use_glu=False, hidden_act="gelu"))
    hidden = torch.randn(3, 16)
    expected = F.gelu(hidden @ part.up_proj.weight.T) @ part.down_proj.weight.T
    torch.testing.assert_close(part(hidden), expected)
    assert len(list(part.parameters())) == 2


@pytest.mark.parametrize("use_glu", [True, False])
def test_transformers_generates_as_the_whole_forward_does(use_glu: bool) -> None:
    torch.manual_seed(0)
    model = RftDecoderForCausalLM(RftDecoderConfig(**SIZES, use_glu=use_glu)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        tokens = model.generate(torch.tensor([[3, 7, 1]]), max_new_tokens=5, do_sample=False, pad_token_id=0)
        logits = model(input_ids=tokens).logits
    assert tokens[0, 3:].tolist() == logits[0, 2:-1].argmax(-1).tolist()
