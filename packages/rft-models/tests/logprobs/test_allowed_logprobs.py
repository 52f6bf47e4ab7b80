"""Log-probs within allowed tokens beside the softmax over the vocabulary with everything else masked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rft_core.packed_tokens import AllowedTokens
from rft_models.logprobs.allowed_logprobs import allowed_logprobs

R, D, V = 7, 6, 40


def case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, AllowedTokens]:
    generator = torch.Generator().manual_seed(3)
    hidden_RD, weight_VD = (torch.randn(n, D, generator=generator, dtype=dtype) for n in (R, V))
    bias_V = torch.randn(V, generator=generator, dtype=dtype)
    counts_R = torch.tensor([1, 5, 3, 12, 1, 40, 2])
    rows = [torch.randperm(V, generator=generator)[: int(count)] for count in counts_R]
    targets_R = torch.stack([row[len(row) // 2] for row in rows])
    return hidden_RD, weight_VD, bias_V, targets_R, AllowedTokens(torch.cat(rows), counts_R)


def masked(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_R: Tensor,
    allowed: AllowedTokens,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    logits_RV = hidden_RD @ weight_VD.T + (0.0 if bias_V is None else bias_V)
    if options.get("softcap"):
        logits_RV = options["softcap"] * torch.tanh(logits_RV / options["softcap"])
    mask_RV = torch.zeros(R, V, dtype=torch.bool)
    rows = torch.repeat_interleave(torch.arange(R), allowed.counts_R)
    mask_RV[rows, allowed.ids_E] = True
    logprobs_RV = (logits_RV / options.get("temperature", 1.0)).masked_fill(~mask_RV, -torch.inf).log_softmax(1)
    entropy_R = -(logprobs_RV.exp() * logprobs_RV.masked_fill(~mask_RV, 0.0)).sum(1)
    return logprobs_RV.gather(1, targets_R[:, None])[:, 0], entropy_R


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"softcap": 2.0, "temperature": 1.5}])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_are_those_of_the_masked_softmax(
    dtype: torch.dtype, options: dict[str, Any], with_bias: bool
) -> None:
    hidden, weight, bias, targets, allowed = case(dtype)
    upstream = torch.linspace(-1.0, 2.0, R, dtype=dtype)
    found: list[list[Tensor]] = []
    for function in (allowed_logprobs, masked):
        leaves = [one.clone().requires_grad_() for one in (hidden, weight, bias)]
        given = leaves[2] if with_bias else None
        if function is allowed_logprobs:
            more: dict[str, Any] = {"bias": given, "with_entropy": True, "entropy_gradient": True, **options}
            logprobs, entropy = allowed_logprobs(leaves[0], leaves[1], targets, allowed, **more)
        else:
            logprobs, entropy = masked(leaves[0], leaves[1], given, targets, allowed, **options)
        assert entropy is not None
        (logprobs @ upstream + entropy @ upstream.flip(0)).backward()
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        assert len(gradients) == 2 + with_bias
        found.append([logprobs.detach(), entropy.detach(), *gradients])
    for ours, reference in zip(*found, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-6, atol=1e-6 if dtype is torch.float32 else 1e-12)


def test_a_token_without_a_choice_is_certain() -> None:
    hidden, weight, _, targets, allowed = case(torch.float32)
    logprobs, entropy = allowed_logprobs(hidden, weight, targets, allowed, with_entropy=True)
    assert entropy is not None
    assert logprobs[[0, 4]].tolist() == entropy[[0, 4]].tolist() == [0.0, 0.0]


def test_the_entropy_has_a_gradient_only_where_it_is_asked_for() -> None:
    hidden, weight, _, targets, allowed = case(torch.float32)
    hidden.requires_grad_()
    assert not (allowed_logprobs(hidden, weight, targets, allowed, with_entropy=True)[1]).requires_grad  # type: ignore[union-attr]
    assert allowed_logprobs(hidden, weight, targets, allowed)[1] is None


def test_logits_far_from_zero_do_not_overflow() -> None:
    hidden, weight, _, targets, allowed = case(torch.float32)
    logprobs, _ = allowed_logprobs(hidden * 1e4, weight, targets, allowed)
    assert bool(logprobs.isfinite().all())
