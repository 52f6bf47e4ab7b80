"""Two ranks that compute families of models together: windows, bent scores, and heads that stay whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rft_core.packed_tokens import PackedTokens
from rft_dist.collectives import Collectives
from rft_dist.strategies.process_groups import TensorGroup
from rft_dist.strategies.sequence_parallel import SequenceGroup
from rft_dist.strategies.tensor_parallel import TensorParallelModel
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import make_policy
from rft_models.policy.tensor_parallel_plan import apply_tensor_parallel, tensor_plan

SIZES: dict[str, Any] = {
    "vocab_size": 49,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 1.5},
    "mistral": {"sliding_window": 5, "tie_word_embeddings": False},
}
LENGTHS = (13, 17)


def distances(ranks: Collectives) -> dict[str, float]:
    """Largest distance of a log-probability or a gradient from that of one rank, by family and way to share."""
    found: dict[str, float] = {}
    for family in FAMILIES:
        expected = computed(made(family))
        ring = made(family)
        ring.enable_sequence_parallel(SequenceGroup(ranks, 2), "ring")
        parts = computed(ring)
        summed = {name: tensor if name == "logprobs" else ranks.sum(tensor) for name, tensor in parts.items()}
        found[f"{family}/ring"] = distance(summed, expected)
        cut, group = made(family), TensorGroup(ranks, 2, torch.device("cpu"))
        plan = tensor_plan(cut, 2)
        shares_head = bool(plan.vocabulary)
        apply_tensor_parallel(cut, lambda: TensorParallelModel(cut.model, plan, group), group, shares_head=shares_head)  # noqa: B023
        found[f"{family}/parts"] = distance(computed(cut), expected)
    return found


def made(family: str) -> CausalPolicy:
    """The same random weights each time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    return make_policy(AutoModelForCausalLM.from_config(config), None, packed=True).train()


def computed(policy: CausalPolicy) -> dict[str, Tensor]:
    """Log-probabilities of two segments and the gradients of their sum, whole."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    segments = torch.arange(2).repeat_interleave(torch.tensor(LENGTHS))
    token_ids = torch.arange(sum(LENGTHS)) * 7 % SIZES["vocab_size"]
    logprobs, _ = policy.token_logprobs(
        PackedTokens(token_ids, positions, segments, torch.ones_like(positions, dtype=torch.bool))
    )
    logprobs.sum().backward()
    found = {"logprobs": logprobs.detach()}
    for name, parameter in policy.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        found[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()
    return found


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest relative L2 distance."""
    return max(float((found[n] - expected[n]).norm() / expected[n].norm().clamp(min=1e-12)) for n in expected)
