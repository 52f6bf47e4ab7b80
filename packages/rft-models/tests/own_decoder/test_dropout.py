"""Dropout of the family's blocks: torch's, none, or keyed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rft_core.errors import OptionsError
from rft_core.packed_tokens import PackedTokens
from rft_models.own_decoder.modeling import RftDecoderConfig, RftDecoderForCausalLM
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import make_policy

FIRST, SECOND = torch.arange(3, 11), torch.arange(2, 9)


def model(**given: Any) -> RftDecoderForCausalLM:
    config = RftDecoderConfig(
        vocab_size=20,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=32,
        **{"dropout": 0.3, "use_glu": False, "hidden_act": "gelu", **given},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return RftDecoderForCausalLM(config)


def policy(**given: Any) -> CausalPolicy:
    return make_policy(model(**given), None, packed=True).train()


def scores(policy: CausalPolicy, *segments: Tensor) -> list[Tensor]:
    logprobs_T, _ = policy.token_logprobs(PackedTokens.of_segments(list(segments)))
    return list(logprobs_T.split([len(segment) for segment in segments]))


def test_nothing_is_dropped_until_there_is_a_seed() -> None:
    trained = policy()
    before = scores(trained, FIRST)[0]
    torch.testing.assert_close(before, scores(trained.eval(), FIRST)[0])
    trained.train().key_dropout(7)
    assert not torch.allclose(before, scores(trained, FIRST)[0])
    torch.testing.assert_close(before, scores(trained.eval(), FIRST)[0])
    with torch.no_grad():  # log-probs that are only read
        torch.testing.assert_close(before, scores(trained.train(), FIRST)[0])


def test_masks_follow_from_sample_update_and_seed_and_from_no_packing() -> None:
    trained = policy()
    trained.key_dropout(7)
    trained.begin_update(3)
    alone, both, swapped = scores(trained, FIRST), scores(trained, FIRST, SECOND), scores(trained, SECOND, FIRST)
    torch.testing.assert_close(alone[0], both[0])
    torch.testing.assert_close(alone[0], swapped[1])
    trained.begin_update(4)
    assert not torch.allclose(alone[0], scores(trained, FIRST)[0])
    other = policy()
    other.key_dropout(8)
    other.begin_update(3)
    assert not torch.allclose(alone[0], scores(other, FIRST)[0])


def test_blocks_have_masks_of_their_own_with_their_share_of_zeros() -> None:
    trained = policy()
    trained.key_dropout(7)
    seen: dict[str, Tensor] = {}
    for name, module in trained.model.named_modules():
        if "drop_" in name:
            module.register_forward_hook(lambda _, inputs, output, name=name: seen.update({name: output == 0}))
    scores(trained, torch.arange(20).repeat(20)[:32])
    assert len(seen) == 5  # the embeddings, and two a block
    masks = list(seen.values())
    assert all(not torch.equal(masks[0], mask) for mask in masks[1:])
    assert float(torch.stack(masks).float().mean()) == pytest.approx(0.3, abs=0.02)


def test_a_model_without_dropout_has_no_masks() -> None:
    trained = policy(dropout=0.0)
    trained.key_dropout(7)
    assert not trained.has_masks
    trained.begin_update(1)


def test_in_the_hands_of_transformers_the_masks_are_those_of_torch() -> None:
    plain = model().train()
    first, again = (plain(input_ids=FIRST[None]).logits for _ in range(2))
    assert not torch.allclose(first, again)
    plain.eval()
    torch.testing.assert_close(plain(input_ids=FIRST[None]).logits, plain(input_ids=FIRST[None]).logits)


def test_ranks_that_share_samples_have_no_dropout() -> None:
    trained = policy()
    trained.backbone.split = object()  # type: ignore[assignment]
    with pytest.raises(OptionsError, match="samples that ranks share"):
        trained.key_dropout(7)
