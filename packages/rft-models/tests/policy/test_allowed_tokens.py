"""A policy's log-probs within allowed tokens, through a real forward, beside its logits with all others masked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rft_core.errors import OptionsError
from rft_core.packed_tokens import AllowedTokens, PackedTokens
from rft_models.logprobs.row_statistics import VocabularyShard
from rft_models.policy.load import make_policy

VOCABULARY = 50
SEGMENTS = [torch.tensor([3, 4, 5, 6, 7]), torch.tensor([9, 8, 7])]
MASK = torch.tensor([False, False, True, True, False, False, True, True])
SETS = [[5, 6, 7], [6], [8, 1, 2, 40], [7, 49]]


def policy_of(family: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    given: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    given |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCABULARY, **sizes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **given)).double()
    return make_policy(model.eval(), None, packed=True)


def batch() -> PackedTokens:
    allowed = AllowedTokens(torch.tensor([t for s in SETS for t in s]), torch.tensor([len(s) for s in SETS]))
    return replace(PackedTokens.of_segments(SEGMENTS), target_mask_T=MASK, allowed=allowed)


def masked_logprobs(policy: Any, tokens: PackedTokens, temperature: float) -> Tensor:
    logits_TV = policy.head.logits(policy.hidden_states(replace(tokens, allowed=None))) / temperature
    found_T = torch.zeros(tokens.num_tokens, dtype=torch.float64)
    for target, ids in zip(MASK.nonzero()[:, 0].tolist(), SETS, strict=True):
        left_V = torch.full((VOCABULARY,), -torch.inf, dtype=torch.float64).index_fill(0, torch.tensor(ids), 0.0)
        found_T[target] = (logits_TV[target - 1] + left_V).log_softmax(0)[tokens.token_ids_T[target]]
    return found_T


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("qwen2", {"tie_word_embeddings": True}), ("llama", {}), ("gemma2", {"final_logit_softcapping": 3.0})],
)
def test_values_and_gradients_are_those_of_masked_logits(family: str, sizes: dict[str, Any]) -> None:
    policy, tokens = policy_of(family, **sizes), batch()
    weights = [parameter for _, parameter in policy.named_parameters()]
    upstream = torch.linspace(0.5, 2.0, tokens.num_tokens, dtype=torch.float64)
    found, entropy = policy.token_logprobs(tokens, temperature=0.7, with_entropy=True)
    wanted = masked_logprobs(policy, tokens, 0.7)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
    ours, theirs = (torch.autograd.grad((one * upstream).sum(), weights, allow_unused=True) for one in (found, wanted))
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    assert found[3] == entropy[3] == 0.0  # one token alone may follow
    assert found[[0, 1, 4, 5]].abs().sum() == 0.0


def test_a_share_of_the_vocabulary_is_refused() -> None:
    policy = policy_of("llama")
    policy.head = replace(policy.head, shard=VocabularyShard.__new__(VocabularyShard))
    with pytest.raises(OptionsError, match="ranks share"):
        policy.head.allowed_logprobs(
            torch.zeros(1, 16), torch.tensor([1]), batch().allowed, temperature=1.0, with_entropy=False
        )
