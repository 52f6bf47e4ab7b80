"""Equality tables: every family's packed forward against each segment alone, and shared prompts against plain ones.

One row a family and forward: log-probabilities, entropies and the gradient of every weight to 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_core.packed_tokens import PackedTokens
from rft_models.attention.shared_prefix import find_shared_prefixes
from rft_models.families.registry import packed_families
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import make_policy

Build = Callable[..., Any]
Batch = tuple[Tensor, Tensor, Tensor, Tensor]
VOCAB = 61
MIXTURES = {"dots1", "mixtral", "qwen2_moe", "qwen3_moe"}
DENSE = {"gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3"}
FAMILIES = sorted(packed_families())
LENGTHS = (7, 1, 12, 3, 9)
# (prompt number, prompt length, response length): two groups of one shape, two ragged ones, and segments between them
GROUPS = (
    *((0, 9, 4), (0, 9, 4), (0, 9, 4), (1, 5, 3), (2, 5, 2), (3, 7, 1), (3, 7, 6), (3, 7, 2)),
    *((4, 9, 4), (4, 9, 4), (4, 9, 4), (5, 7, 3), (5, 7, 1), (5, 7, 2)),
)


def ragged() -> Batch:
    """(token ids, positions, segment ids, wanted): every third token of a segment is not wanted."""
    ids = torch.randint(0, VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    segments = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    return ids, positions, segments, positions % 3 != 2


def grouped() -> Batch:
    """Prompts that neighbours share, their responses wanted."""
    generator = torch.Generator().manual_seed(5)
    prompts = {n: torch.randint(0, VOCAB, (p,), generator=generator) for n, p, _ in dict.fromkeys(GROUPS)}
    parts = [torch.cat([prompts[n], torch.randint(0, VOCAB, (r,), generator=generator)]) for n, _, r in GROUPS]
    positions = torch.cat([torch.arange(len(part)) for part in parts])
    segments = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(part) for part in parts]))
    return torch.cat(parts), positions, segments, positions >= torch.tensor([p for _, p, _ in GROUPS])[segments]


def models_own(model: Any, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of each segment alone, from the model's full logits."""
    ids, _, segments, wanted = batch
    logprobs, entropies = torch.zeros(len(ids), dtype=model.dtype), torch.zeros(len(ids), dtype=model.dtype)
    for number in segments.unique().tolist():
        (place,) = torch.where(segments == number)
        logits = model(input_ids=ids[place][None], use_cache=False).logits[0, :-1] / temperature
        table = torch.log_softmax(logits, -1)
        logprobs = logprobs.index_copy(0, place[1:], table.gather(1, ids[place][1:, None])[:, 0])
        entropies = entropies.index_copy(0, place[1:], -(table.exp() * table).sum(-1))
    return logprobs * wanted, entropies * wanted


def segment_by_segment(policy: CausalPolicy, batch: Batch) -> tuple[Tensor, Tensor]:
    """The policy itself, one segment a call: nothing can be shared."""
    ids, positions, segments, wanted = batch
    rows = [segments == number for number in segments.unique()]
    calls = [PackedTokens(ids[row], positions[row], segments[row], wanted[row]) for row in rows]
    found = [policy.token_logprobs(call, with_entropy=True) for call in calls]
    return torch.cat([row for row, _ in found]), torch.cat([row for _, row in found if row is not None])


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """Of every weight, 0 where none arrived."""
    model.zero_grad()
    loss.backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def assert_equal_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    assert found.keys() == expected.keys()
    assert sum(float(gradient.norm()) for gradient in expected.values()) > 0.1
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= relative * gradient.norm() + 1e-6, name


def test_the_table_has_every_family_that_is_named_for_it() -> None:
    assert packed_families() >= DENSE | MIXTURES


@pytest.mark.parametrize("model_type", [*FAMILIES, "gpt2"])
def test_packed_equals_one_by_one(model_type: str, tiny_model: Build) -> None:
    batch = ragged()
    reference = tiny_model(model_type)
    policy = make_policy(tiny_model(model_type), None, packed=model_type in packed_families())
    expected, expected_entropy = models_own(reference, batch, 0.8)
    found, entropy = policy.token_logprobs(PackedTokens(*batch), temperature=0.8, with_entropy=True)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=1e-5)
    weights = torch.linspace(-1, 1, len(found))
    wanted = gradients(reference, (expected * weights).sum())
    assert_equal_gradients(gradients(policy.model, (found * weights).sum()), wanted, 1e-5)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_shared_prompts_equal_plain_ones(model_type: str, tiny_model: Build) -> None:
    # grouped products of experts have no float64 form, their loop has
    model = tiny_model(model_type, dtype=torch.float64)
    if model_type in MIXTURES:
        model.set_experts_implementation("eager")
    policy = make_policy(model, None, packed=True)
    batch = grouped()
    assert find_shared_prefixes(*batch) is not None
    expected, expected_entropy = segment_by_segment(policy, batch)
    weights = torch.linspace(-1, 1, len(expected), dtype=torch.float64)
    wanted = gradients(model, (expected * weights).sum())
    found, entropy = policy.token_logprobs(PackedTokens(*batch), with_entropy=True)
    exact = 1e-6 if model_type in MIXTURES else 1e-10  # routers take their softmax in float32
    torch.testing.assert_close(found, expected, atol=exact, rtol=exact)
    torch.testing.assert_close(entropy, expected_entropy, atol=exact, rtol=exact)
    # transformers' norms compute in float32 whatever the weights are
    assert_equal_gradients(gradients(model, (found * weights).sum()), wanted, 1e-6)


@pytest.mark.parametrize("model_type", sorted(MIXTURES))
def test_shared_prompts_of_mixtures_equal_plain_ones_with_grouped_products(model_type: str, tiny_model: Build) -> None:
    policy = make_policy(tiny_model(model_type), None, packed=True)
    batch = grouped()
    expected, _ = segment_by_segment(policy, batch)
    weights = torch.linspace(-1, 1, len(expected))
    wanted = gradients(policy.model, (expected * weights).sum())
    found, _ = policy.token_logprobs(PackedTokens(*batch))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert_equal_gradients(gradients(policy.model, (found * weights).sum()), wanted, 1e-5)


def test_a_float64_policy_gives_float64_logprobs(tiny_model: Build) -> None:
    batch = ragged()
    found, _ = make_policy(tiny_model("qwen2", dtype=torch.float64), None, packed=True).token_logprobs(
        PackedTokens(*batch)
    )
    reference = tiny_model("qwen2", dtype=torch.float64)
    reference.set_attn_implementation("sdpa")  # transformers' eager attention takes its softmax in float32
    expected, _ = models_own(reference, batch, 1.0)
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
