"""RMS norms with a gradient of their own against transformers' modules and autograd in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from rft_models.layers.fast_norm import FastRmsNorm, use_fast_norms

SHAPES = [(7, 64), (1, 9, 4, 16), (2, 3, 5), (0, 8), (1, 1)]


def pair(kind: type[Any], width: int, *, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """One norm of transformers, and one from here with the same weights."""
    torch.manual_seed(0)
    theirs, ours = (kind(width, eps=1e-5).to(dtype) for _ in range(2))
    with torch.no_grad():
        theirs.weight.normal_(1.0, 0.5)
        ours.weight.copy_(theirs.weight)
    assert use_fast_norms(ours) == 1
    return theirs, ours


@pytest.mark.parametrize("kind", [LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize("with_gradient", [True, False])
def test_values_are_those_of_transformers_to_the_bit(kind: type[Any], with_gradient: bool) -> None:
    theirs, ours = pair(kind, 64)
    hidden = torch.randn(33, 64) * 3
    with torch.set_grad_enabled(with_gradient):
        torch.testing.assert_close(ours(hidden), theirs(hidden), rtol=0, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_float64(shape: tuple[int, ...]) -> None:
    theirs, ours = pair(Qwen3RMSNorm, shape[-1])
    hidden = torch.randn(shape) * 2
    upstream = torch.randn(shape)

    def gradients(module: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        at = hidden.to(dtype).requires_grad_()
        # Qwen3's own norm rounds to float32 inside: the reference is written out
        weight = module.weight.detach().to(dtype).requires_grad_()
        normed = at / (at.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return torch.autograd.grad(weight * normed, [at, weight], upstream.to(dtype))

    at = hidden.clone().requires_grad_()
    found = torch.autograd.grad(ours(at), [at, ours.weight], upstream)
    for ours_grad, expected in zip(found, gradients(theirs, torch.float64), strict=True):
        torch.testing.assert_close(ours_grad.double(), expected, rtol=1e-5, atol=1e-5)


def test_views_and_frozen_weights_have_gradients() -> None:
    theirs, ours = pair(Qwen3RMSNorm, 8)
    ours.weight.requires_grad_(False)
    theirs.weight.requires_grad_(False)
    found = torch.randn(5, 48, requires_grad=True)
    expected = found.detach().clone().requires_grad_()
    for module, rows in ((ours, found), (theirs, expected)):
        heads = module(rows.view(5, 6, 8)[:, 1:4].transpose(0, 1))
        heads.sin().sum().backward()
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_computed_as_transformers_does(dtype: torch.dtype) -> None:
    theirs, ours = pair(LlamaRMSNorm, 32, dtype=dtype)
    hidden = torch.randn(6, 32, dtype=dtype, requires_grad=True)
    found, expected = ours(hidden), theirs(hidden)
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    (by_ours,), (by_theirs,) = (torch.autograd.grad(each.sum(), [hidden]) for each in (found, expected))
    torch.testing.assert_close(by_ours, by_theirs, rtol=0, atol=0)


def test_norms_that_compute_something_else_are_left_alone() -> None:
    class LlamaRMSNorm(nn.Module):  # of a user, whose computation is not known
        weight = torch.ones(4)

    model = nn.Sequential(Qwen3RMSNorm(4), GemmaRMSNorm(4), LlamaRMSNorm(), nn.RMSNorm(4))
    names = {name: id(value) for name, value in model.named_parameters()}
    assert use_fast_norms(model) == 1
    assert use_fast_norms(model) == 0
    assert [type(each) is FastRmsNorm for each in model] == [True, False, False, False]
    assert {name: id(value) for name, value in model.named_parameters()} == names
    assert repr(model[0]) == "FastRmsNorm((4,), eps=1e-06)"


def test_a_compiler_sees_single_operations() -> None:
    torch._dynamo.reset()
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        del inputs
        called.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    theirs, ours = pair(Qwen3RMSNorm, 16)
    hidden = torch.randn(3, 16, requires_grad=True)
    torch.testing.assert_close(torch.compile(ours, backend=backend)(hidden), theirs(hidden))
    assert any("rsqrt" in name for name in called), called
    assert not any("autograd" in name for name in called), called
