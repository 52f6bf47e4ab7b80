"""A policy whose products are computed in fewer bits beside float32 weights (`Backbone.autocast`)."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_core.packed_tokens import PackedTokens
from rft_models.layers.moe_router import gates_of
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import make_policy

Build = Callable[..., Any]
LENGTHS = (7, 3, 12)


def tokens() -> PackedTokens:
    ids = torch.randint(3, 61, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return PackedTokens(ids, positions, torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS)), positions > 2)


def measured(policy: CausalPolicy) -> tuple[Tensor, dict[str, Tensor]]:
    policy.model.zero_grad(set_to_none=True)
    logprobs, _ = policy.token_logprobs(tokens())
    logprobs.sum().backward()
    gradients = {name: each.grad for name, each in policy.model.named_parameters() if each.grad is not None}
    return logprobs.detach(), gradients


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("family", "packed"), [("qwen3", True), ("llama", False), ("qwen3_moe", True)])
def test_products_are_rounded_and_weights_and_gradients_are_float32(
    tiny_model: Build, family: str, packed: bool, dtype: torch.dtype
) -> None:
    policy = make_policy(tiny_model(family), None, packed=packed)
    exact, own = measured(policy)
    policy.backbone.autocast = dtype
    rounded, gradients = measured(policy)
    assert policy.backbone.states(tokens()).hidden_KD.dtype == dtype
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    assert (rounded - exact).abs().max() < 0.3  # of log-probabilities of about -4, by weights that are spread out
    assert gradients.keys() == own.keys()
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    flat = [torch.cat([each.reshape(-1) for each in found.values()]) for found in (own, gradients)]
    assert torch.cosine_similarity(*flat, dim=0) > 0.98


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "dots1"])
def test_routers_compute_in_float32(tiny_model: Build, family: str, dtype: torch.dtype) -> None:
    policy = make_policy(tiny_model(family), None, packed=True)
    policy.backbone.autocast = dtype
    policy.backbone.autocast = dtype  # once more changes nothing
    for model in (policy.model, deepcopy(policy.model)):
        gates = gates_of(model)
        assert gates
        for gate in gates:
            hidden = torch.randn(9, gate.weight.shape[1], generator=torch.Generator().manual_seed(2))
            with torch.autocast("cpu", dtype=dtype):
                logits, _, experts = gate(hidden)
            (other,) = torch.autograd.grad(logits.square().sum(), gate.weight)
            expected = hidden @ gate.weight.detach().mT
            torch.testing.assert_close(logits.detach(), expected, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(other, 2 * expected.mT @ hidden, atol=1e-5, rtol=1e-5)
            own = type(gate).forward(gate, hidden)
            assert torch.equal(logits, own[0])
            assert torch.equal(experts, own[2])


def test_the_logits_of_a_step_are_float32(tiny_model: Build) -> None:
    policy = make_policy(tiny_model("qwen3_moe"), None, packed=True)
    routed: dict[bool, list[Tensor]] = {}
    for on in (False, True):
        policy.backbone.autocast = torch.bfloat16 if on else None
        policy.backbone.states(tokens(), routed=routed.setdefault(on, []))
    assert {logits.dtype for logits in routed[True]} == {torch.float32}
    for exact, found in zip(routed[False], routed[True], strict=True):
        torch.testing.assert_close(found, exact, atol=0.1, rtol=0)


def test_a_patch_of_one_gate_stays(tiny_model: Build) -> None:
    policy = make_policy(tiny_model("mixtral"), None, packed=True)
    gate = gates_of(policy.model)[0]
    gate.forward = lambda hidden: (hidden @ gate.weight.mT, torch.is_autocast_enabled("cpu"))
    policy.backbone.autocast = torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, rounded = gate(torch.ones(2, gate.weight.shape[1]))
    assert (logits.dtype, rounded) == (torch.float32, False)


def test_terms_of_the_vocabulary_follow_the_rounded_head(tiny_model: Build) -> None:
    policy = make_policy(tiny_model("qwen3"), None, packed=True)
    policy.backbone.autocast = torch.bfloat16
    with torch.no_grad():
        logprobs, log_z, mean = policy.vocabulary_terms(tokens(), with_mean=True)
        logits = policy.head.logits(policy.backbone.hidden_states(tokens()))
    assert mean is not None
    chosen = tokens().targets_T.nonzero()[:, 0]
    torch.testing.assert_close(log_z[chosen], logits[chosen - 1].logsumexp(-1), atol=0.02, rtol=0)
    assert bool((logprobs[chosen] < 0).all())
