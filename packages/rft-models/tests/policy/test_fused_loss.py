"""An objective taken into the head: the same loss and the same gradients as log-probabilities first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_core.packed_tokens import PackedTokens
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import make_policy

Build = Callable[..., Any]
VOCAB = 61


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three sequences, two of which begin with the same prompt; prompts and one token are not wanted."""
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(0, VOCAB, (6,), generator=generator)
    rows = [torch.cat([prompt, torch.randint(0, VOCAB, (n,), generator=generator)]) for n in (5, 8)]
    rows.append(torch.randint(0, VOCAB, (7,), generator=generator))
    ids_T = torch.cat(rows)
    positions_T = torch.cat([torch.arange(len(row)) for row in rows])
    segments_T = torch.cat([torch.full((len(row),), number) for number, row in enumerate(rows)])
    target_mask_T = torch.cat([torch.arange(len(row)) >= start for row, start in zip(rows, (6, 6, 2), strict=True)])
    target_mask_T[8] = False
    return ids_T, positions_T, segments_T, target_mask_T


def clipped(old_T: Tensor, advantages_T: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """PPO's loss with an entropy bonus, each token with its weight; a third of the tokens have no gradient."""

    def losses(logprobs_N: Tensor, entropy_N: Tensor, tokens_N: Tensor) -> Tensor:
        ratio_N, advantages_N = (logprobs_N - old_T[tokens_N]).exp(), advantages_T[tokens_N]
        surrogate_N = -torch.minimum(ratio_N * advantages_N, ratio_N.clamp(0.8, 1.2) * advantages_N)
        return (surrogate_N - 0.05 * entropy_N * (advantages_N != 0)) / 17.0

    return losses


def gradients(policy: CausalPolicy, loss: Tensor) -> dict[str, Tensor]:
    policy.model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "gemma2", "gpt2"])
def test_the_same_loss_and_gradients(model_type: str, chunk: int | None, tiny_model: Build) -> None:
    policy = make_policy(tiny_model(model_type), None, packed=model_type != "gpt2", head_chunk_size=chunk)
    given = batch()
    ids_T, target_mask_T = given[0], given[3]
    generator = torch.Generator().manual_seed(5)
    old_T = policy.token_logprobs(PackedTokens(*given), temperature=0.9)[0].detach() + 0.3 * torch.randn(
        len(ids_T), generator=generator
    )
    advantages_T = torch.randint(-1, 2, (len(ids_T),), generator=generator).float()
    objective = clipped(old_T, advantages_T)

    logprobs_T, entropy_T = policy.token_logprobs(
        PackedTokens(*given), temperature=0.9, with_entropy=True, entropy_gradient=True
    )
    assert entropy_T is not None
    tokens = target_mask_T.nonzero()[:, 0]
    loss = objective(logprobs_T[tokens], entropy_T[tokens], tokens).sum()
    expected = gradients(policy, loss)

    found = policy.fused_loss(PackedTokens(*given), objective, temperature=0.9)
    torch.testing.assert_close(found.loss, loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.logprobs, logprobs_T.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.entropy, entropy_T.detach(), rtol=1e-5, atol=1e-5)
    assert not found.logprobs.requires_grad
    for name, gradient in gradients(policy, found.loss).items():
        difference = float((gradient - expected[name]).norm() / (expected[name].norm() + 1e-6))
        assert difference < 1e-5, f"{name}: {difference:.1e}"


def test_no_more_rows_than_asked_for_are_formed_at_a_time(tiny_model: Build) -> None:
    given = batch()
    sizes: dict[int | None, list[int]] = {}
    for chunk in (None, 4):
        policy = make_policy(tiny_model("qwen2"), None, packed=True, head_chunk_size=chunk)
        sizes[chunk] = seen = []

        def objective(logprobs_N: Tensor, entropy_N: Tensor, tokens_N: Tensor, seen: list[int] = seen) -> Tensor:
            seen.append(len(tokens_N))
            return -logprobs_N

        policy.fused_loss(PackedTokens(*given), objective)
    num_rows = int(given[3].sum())
    assert sizes[None] == [num_rows]
    assert sum(sizes[4]) == num_rows
    assert max(sizes[4]) <= 4


def test_a_frozen_head_gets_no_gradient(tiny_model: Build) -> None:
    policy = make_policy(tiny_model("qwen2", tie_word_embeddings=False), None, packed=True)
    policy.head.weight.requires_grad_(False)
    given = batch()
    objective = clipped(torch.zeros(len(given[0])), torch.ones(len(given[0])))
    found = gradients(policy, policy.fused_loss(PackedTokens(*given), objective).loss)
    assert "lm_head.weight" not in found
    assert "model.layers.0.mlp.up_proj.weight" in found


def test_it_is_preferred_where_logits_are_not_kept(tiny_model: Build) -> None:
    policy = make_policy(tiny_model("qwen2", dtype=torch.bfloat16), None, packed=True)
    assert not policy.prefers_fused_loss(1000)
    assert policy.prefers_fused_loss(1_000_000)
    chunked = make_policy(tiny_model("qwen2", dtype=torch.bfloat16), None, packed=True, head_chunk_size=4096)
    assert chunked.prefers_fused_loss(1)
    assert not make_policy(tiny_model("qwen2"), None, packed=True).prefers_fused_loss(1_000_000)
