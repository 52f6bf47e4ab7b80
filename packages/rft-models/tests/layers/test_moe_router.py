"""The routers' load-balancing loss: hand values, the model's own number, and the same however a step is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_core.errors import OptionsError, PreflightError
from rft_core.packed_tokens import PackedTokens
from rft_models.attention.shared_prefix import find_shared_prefixes
from rft_models.layers.gradient_checkpointing import Checkpointing
from rft_models.layers.moe_router import (
    Router,
    count_experts,
    load_balancing_loss,
    router_facts,
    router_of,
    verify_router,
)
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import make_policy

Build = Callable[..., Any]
Batch = tuple[Tensor, Tensor, Tensor, Tensor]
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")


def batch(lengths: tuple[int, ...] = (7, 9, 4, 6), prompt: int = 3, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 61, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return ids, positions, segments, positions >= prompt


def part(whole: Batch, numbers: list[int]) -> Batch:
    inside = torch.isin(whole[2], torch.tensor(numbers))
    return whole[0][inside], whole[1][inside], whole[2][inside], whole[3][inside]


def gradients(policy: CausalPolicy, loss: Tensor) -> dict[str, Tensor]:
    policy.model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def test_hand_values() -> None:
    """Two rows, three experts, one choice: rows go to 0 and 2; P = (0.5, 0.25, 0.25) and (0.2, 0.2, 0.6)."""
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]).log()
    router = Router(num_experts=3, num_choices=1)
    rows = torch.arange(2)
    assert count_experts([logits], rows, router).tolist() == [1, 0, 1]
    found = load_balancing_loss([logits], rows, router)
    assert float(found.share) == pytest.approx(3 * (0.5 * 0.35 + 0.5 * 0.425))
    assert float(found.max_load) == pytest.approx(1.5)
    twice = load_balancing_loss([logits], torch.tensor([0, 0, 1]), router)
    assert float(twice.share) == pytest.approx(3 * (2 / 3 * 0.4 + 1 / 3 * 1.1 / 3))
    given = load_balancing_loss([logits], rows, router, torch.tensor([0, 4, 0]))
    assert float(given.share) == pytest.approx(3 * 0.45 / 4), "R and f are those of the step"


def test_an_even_spread_gives_the_number_of_choices() -> None:
    logits = 0.001 * torch.tensor([[2.0, 1, 0, 0], [0, 2, 1, 0], [0, 0, 2, 1], [1, 0, 0, 2]])
    even = load_balancing_loss([logits, logits], torch.arange(4), Router(4, 2))
    assert float(even.share) == pytest.approx(2.0, abs=1e-6)
    assert float(even.max_load) == pytest.approx(1.0)
    one_sided = load_balancing_loss([10 * torch.eye(4)[:1].expand(6, 4)], torch.arange(6), Router(4, 1))
    assert float(one_sided.share) > 3.9


@pytest.mark.parametrize("model_type", MIXTURES)
def test_it_is_the_models_own_loss(model_type: str, tiny_model: Build) -> None:
    """transformers counts every token that is not padding: so does this where the row after each is wanted."""
    policy = make_policy(tiny_model(model_type), None, packed=True)
    ids = torch.randint(0, 61, (12,), generator=torch.Generator().manual_seed(3))
    reference = tiny_model(model_type)
    output = reference(input_ids=ids[None, :-1], use_cache=False, output_router_logits=True)
    positions = torch.arange(12)
    _, _, found = policy.token_logprobs_and_balance(
        PackedTokens(ids, positions, torch.zeros_like(ids), positions > 0), expert_counts_E=None
    )
    torch.testing.assert_close(found.share, output.aux_loss, atol=1e-5, rtol=1e-5)
    output.aux_loss.backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    for name, gradient in gradients(policy, found.share).items():
        wanted = expected.get(name, torch.zeros(()))
        assert (gradient - wanted).norm() <= 1e-5 * wanted.norm() + 1e-6, name


@pytest.mark.parametrize("model_type", MIXTURES)
@pytest.mark.parametrize("packed", [True, False])
def test_parts_of_a_cut_step_add_up_to_the_whole(model_type: str, packed: bool, tiny_model: Build) -> None:
    policy = make_policy(tiny_model(model_type), None, packed=packed)
    whole = batch()
    _, _, expected = policy.token_logprobs_and_balance(PackedTokens(*whole), expert_counts_E=None)
    wanted = gradients(policy, expected.share)
    cuts = [part(whole, [0, 3]), part(whole, [1]), part(whole, [2])]
    counts_E = torch.stack([policy.expert_counts(PackedTokens(*cut)) for cut in cuts]).sum(0)
    assert float(counts_E.sum()) == int(whole[3].sum()) * 2 * 2, "tokens of the loss x layers x choices"
    found = [policy.token_logprobs_and_balance(PackedTokens(*cut), expert_counts_E=counts_E)[2] for cut in cuts]
    total = torch.stack([each.share for each in found]).sum()
    torch.testing.assert_close(total, expected.share, atol=1e-6, rtol=1e-5)
    assert all(float(each.max_load) == pytest.approx(float(expected.max_load)) for each in found)
    for name, gradient in gradients(policy, total).items():
        assert (gradient - wanted[name]).norm() <= 1e-5 * wanted[name].norm() + 1e-6, name


@pytest.mark.parametrize("model_type", MIXTURES)
def test_a_shared_prompt_changes_nothing(model_type: str, tiny_model: Build) -> None:
    ids, positions, segments, wanted = batch((9, 9, 9), prompt=6)
    ids = torch.where(wanted, ids, ids[:9].repeat(3))
    assert find_shared_prefixes(ids, positions, segments, wanted) is not None
    policy = make_policy(tiny_model(model_type), None, packed=True)
    alone = [part((ids, positions, segments, wanted), [number]) for number in range(3)]
    counts_E = torch.stack([policy.expert_counts(PackedTokens(*each)) for each in alone]).sum(0)
    expected = torch.stack(
        [policy.token_logprobs_and_balance(PackedTokens(*each), expert_counts_E=counts_E)[2].share for each in alone]
    ).sum()
    wanted_gradients = gradients(policy, expected)
    logprobs, _, found = policy.token_logprobs_and_balance(
        PackedTokens(ids, positions, segments, wanted), expert_counts_E=None
    )
    torch.testing.assert_close(found.share, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logprobs, policy.token_logprobs(PackedTokens(ids, positions, segments, wanted))[0])
    for name, gradient in gradients(policy, found.share).items():
        assert (gradient - wanted_gradients[name]).norm() <= 1e-5 * wanted_gradients[name].norm() + 1e-6, name


@pytest.mark.parametrize("model_type", MIXTURES)
@pytest.mark.parametrize("checkpointing", [None, Checkpointing()])
def test_a_forward_whose_routers_are_watched_is_the_same_to_the_bit(
    model_type: str, checkpointing: Checkpointing | None, tiny_model: Build
) -> None:
    model = tiny_model(model_type)
    policy = make_policy(model, None, packed=True, gradient_checkpointing=checkpointing).train()
    tokens = PackedTokens(*batch())
    plain, plain_entropy = policy.token_logprobs(tokens, with_entropy=True)
    wanted = gradients(policy, plain.sum())
    with policy.watching_routers() as seen:
        watched, entropy = policy.token_logprobs(tokens, with_entropy=True)
        assert entropy is not None
        assert plain_entropy is not None
        assert torch.equal(watched, plain)
        assert torch.equal(entropy, plain_entropy)
        found = gradients(policy, watched.sum())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    # the backward pass computes checkpointed layers again, and counts none of it
    (said,) = seen
    _, _, expected = policy.token_logprobs_and_balance(tokens, expert_counts_E=None)
    assert torch.equal(said.loads_LE, expected.loads_LE)
    assert torch.equal(said.log_normaliser_LR, expected.log_normaliser_LR.detach())
    assert float(said.max_logit) == float(expected.max_logit)
    assert not said.log_normaliser_LR.requires_grad
    policy.token_logprobs(tokens)
    assert len(seen) == 1, "behind the context nothing is kept"


def test_a_fused_loss_is_watched_as_log_probs_are(tiny_model: Build) -> None:
    policy = make_policy(tiny_model("qwen3_moe"), None, packed=True)
    tokens = PackedTokens(*batch())
    with policy.watching_routers() as seen:
        policy.token_logprobs(tokens)
        policy.fused_loss(tokens, lambda logprobs, entropies, _: -logprobs)
    assert torch.equal(seen[0].loads_LE, seen[1].loads_LE)
    assert seen[1].loads_LE.sum(-1).tolist() == [2 * int(tokens.targets_T.sum())] * 2


@pytest.mark.parametrize("chosen", [Checkpointing(), Checkpointing(selective=True)])
def test_checkpointing_changes_no_gradient_of_it(chosen: Checkpointing, tiny_model: Build) -> None:
    found = []
    for checkpointing in (None, chosen):
        policy = make_policy(tiny_model("qwen3_moe"), None, packed=True, gradient_checkpointing=checkpointing).train()
        logprobs, _, each = policy.token_logprobs_and_balance(PackedTokens(*batch()), expert_counts_E=None)
        found.append(gradients(policy, each.share - logprobs.sum()))
    assert found[0].keys() == found[1].keys()
    assert any(name.endswith("gate.weight") for name in found[0])
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-6, rtol=1e-6)


def test_a_dense_model_is_refused_by_name(tiny_model: Build, character_directory: Path) -> None:
    policy = make_policy(tiny_model("qwen2"), None, packed=True)
    with pytest.raises(OptionsError, match="'qwen2'") as caught:
        policy.token_logprobs_and_balance(PackedTokens(*batch()), expert_counts_E=None)
    assert caught.value.problem.code == "router.none"
    with pytest.raises(OptionsError, match="'qwen2'"), policy.watching_routers():
        pass
    with pytest.raises(OptionsError, match="aux_loss_coef") as caught:
        router_facts(character_directory)
    assert caught.value.problem.code == "router.none"
    with pytest.raises(OptionsError):
        router_of("no_such_type", {"num_experts": 4, "num_experts_per_tok": 2}, "here")


def test_facts_of_a_directory_are_those_of_the_model(tiny_model: Build, tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path)
    assert router_facts(tmp_path) == make_policy(model, None, packed=True).router == Router(4, 2)


def test_another_loss_of_the_model_is_refused(tiny_model: Build) -> None:
    model = tiny_model("qwen3_moe")
    with pytest.raises(PreflightError) as caught:
        verify_router(model, Router(4, 1), "model")
    assert caught.value.problem.code == "router.differs"
