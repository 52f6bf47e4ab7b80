"""What packing must not change: neighbours, chunks of the head, recomputation, blocks. Equality is in test_equality."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_core.errors import OptionsError
from rft_core.packed_tokens import PackedTokens
from rft_models.attention.hf_interface import attention_function
from rft_models.attention.packed import PackedLayout, packed_attention
from rft_models.policy.load import make_policy

VOCAB = 61
Build = Callable[..., Any]
LENGTHS = (7, 1, 12, 3, 9)


def packed_batch(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(token ids, positions, segment ids, wanted): every third token of a segment is not wanted."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return ids, positions, segments, positions % 3 != 2


def gradients(model: Any, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("packed", [True, False])
def test_tokens_of_one_segment_do_not_reach_another(packed: bool, tiny_model: Build) -> None:
    ids, positions, segments, wanted = packed_batch()
    policy = make_policy(tiny_model("qwen2"), None, packed=packed)
    before, _ = policy.token_logprobs(PackedTokens(ids, positions, segments, wanted))
    changed = torch.where(segments == 2, (ids + 5) % VOCAB, ids)
    after, _ = policy.token_logprobs(PackedTokens(changed, positions, segments, wanted))
    others = segments != 2
    torch.testing.assert_close(after[others], before[others], atol=1e-6, rtol=0)
    assert (after - before)[~others].abs().max() > 0.01


def test_unwanted_and_first_tokens_are_zero_and_nothing_wanted_still_has_a_gradient(tiny_model: Build) -> None:
    ids, positions, segments, _ = packed_batch()
    policy = make_policy(tiny_model("llama"), None, packed=True)
    everything, _ = policy.token_logprobs(
        PackedTokens(ids, positions, segments, torch.ones_like(ids, dtype=torch.bool))
    )
    assert (everything[positions == 0] == 0).all()
    assert (everything[positions != 0] < 0).all()
    nothing, entropy = policy.token_logprobs(
        PackedTokens(ids, positions, segments, torch.zeros_like(ids, dtype=torch.bool)), with_entropy=True
    )
    assert entropy is not None
    assert (nothing == 0).all()
    assert (entropy == 0).all()
    nothing.sum().backward()


def test_gradient_checkpointing_changes_no_gradient(tiny_model: Build) -> None:
    batch = packed_batch()
    results = []
    for checkpointing in (False, True):
        policy = make_policy(tiny_model("qwen3"), None, packed=True, gradient_checkpointing=checkpointing)
        policy.train()
        loss = policy.token_logprobs(PackedTokens(*batch))[0].sum()
        results.append((loss.detach(), gradients(policy.model, loss)))
    assert torch.equal(results[0][0], results[1][0])
    for plain, checkpointed in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(checkpointed, plain, atol=1e-6, rtol=1e-6)


def test_head_chunks_change_neither_value_nor_gradient(tiny_model: Build) -> None:
    batch = packed_batch()
    results = []
    for chunk_size in (None, 1, 5, 64):
        policy = make_policy(tiny_model("gemma2"), None, packed=True, head_chunk_size=chunk_size)
        loss = policy.token_logprobs(PackedTokens(*batch))[0].sum()
        results.append((loss.detach(), gradients(policy.model, loss)))
    for loss, grads in results[1:]:
        torch.testing.assert_close(loss, results[0][0], atol=1e-4, rtol=1e-6)
        for ours, theirs in zip(grads, results[0][1], strict=True):
            assert (ours - theirs).norm() <= 1e-5 * theirs.norm() + 1e-6


def test_result_does_not_depend_on_what_is_packed_beside_it(tiny_model: Build) -> None:
    ids, positions, segments, wanted = packed_batch()
    policy = make_policy(tiny_model("gemma2"), None, packed=True)
    together, _ = policy.token_logprobs(PackedTokens(ids, positions, segments, wanted))
    rows = [segments == number for number in range(5)]
    alone = [
        policy.token_logprobs(PackedTokens(ids[row], positions[row], segments[row], wanted[row]))[0] for row in rows
    ]
    torch.testing.assert_close(torch.cat(alone), together, atol=2e-6, rtol=0)


@pytest.mark.parametrize("lengths", [(4, 4, 4), (1,), (9, 8, 1, 1, 1, 30), (2, 64, 3)])
def test_blocks_hold_every_token_once_with_bounded_padding(lengths: tuple[int, ...]) -> None:
    layout = PackedLayout.from_lengths(lengths)
    places = sum(block.num_segments * block.length for block in layout.blocks)
    assert sum(block.num_segments for block in layout.blocks) == len(lengths)
    assert places <= 1.5 * sum(lengths)
    if layout.scatter_T is not None:
        tokens = torch.cat([block.gather_SL for block in layout.blocks if block.gather_SL is not None])
        assert torch.equal(tokens[layout.scatter_T], torch.arange(sum(lengths)))


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 0.7), (3, 0.7)])
def test_attention_equals_the_written_out_formula(window: int | None, softcap: float | None) -> None:
    lengths, heads, groups, width = (5, 2, 7), 4, 2, 6
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(14, heads, width, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 14, groups, width, generator=generator, dtype=torch.float64)
    found = packed_attention(
        query, key, value, PackedLayout.from_lengths(lengths), scaling=0.3, sliding_window=window, softcap=softcap
    )
    expected = torch.zeros_like(found)
    start = 0
    for length in lengths:
        for t in range(length):
            first = 0 if window is None else max(0, t - window + 1)
            seen = slice(start + first, start + t + 1)
            for head in range(heads):
                scores = 0.3 * key[seen, head // 2] @ query[start + t, head]
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                expected[start + t, head] = torch.softmax(scores, 0) @ value[seen, head // 2]
        start += length
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_an_argument_that_changes_the_scores_is_refused_by_name() -> None:
    tensor = torch.zeros(1, 1, 2, 4)
    with pytest.raises(OptionsError, match="s_aux") as caught:
        attention_function(torch.nn.Identity(), tensor, tensor, tensor, None, s_aux=torch.zeros(1))
    assert caught.value.problem.code == "models.attention_argument"
