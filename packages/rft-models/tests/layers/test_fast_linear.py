"""The fast linear product against torch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.fx
from torch import nn
from torch.nn import functional as F

from rft_models.layers.fast_linear import FastLinear, linear, product_nt, product_tn, use_fast_linears


@pytest.mark.parametrize("shape", [(64, 24), (3, 40, 24), (2, 24), (0, 24)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_equal_torch(shape: tuple[int, ...], with_bias: bool) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(shape, requires_grad=True)
    weight = torch.randn(40, 24, requires_grad=True)
    bias = torch.randn(40, requires_grad=True) if with_bias else None
    leaves = [inputs, weight, *([bias] if bias is not None else [])]
    found, expected = linear(inputs, weight, bias), F.linear(inputs, weight, bias)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(expected.shape)
    for ours, theirs in zip(
        torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_products_keep_dtype_and_orientation(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(50, 33, dtype=dtype), torch.randn(40, 33, dtype=dtype)
    nt, tn = product_nt(left, right), product_tn(left, torch.ones(50, 7, dtype=dtype))
    assert nt.dtype is dtype
    torch.testing.assert_close(nt.double(), left.double() @ right.double().T, atol=0.2, rtol=0.02)
    torch.testing.assert_close(tn.double()[:, 0], left.double().sum(0), atol=0.3, rtol=0.02)


def test_swapping_keeps_parameters_names_and_other_layers() -> None:
    class Wrapped(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(3, 4), Wrapped(4, 5))
    names = dict(model.named_parameters())
    assert use_fast_linears(model) == 1
    assert isinstance(model[0], FastLinear)
    assert type(model[1]) is Wrapped
    assert {name: id(value) for name, value in model.named_parameters()} == {n: id(v) for n, v in names.items()}


def test_compiled_layers_have_products_that_the_compiler_lowers() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        del inputs
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    layer = FastLinear(1024, 1024)
    inputs = torch.randn(8, 1024)
    found = torch.compile(layer, backend=backend)(inputs)
    torch.testing.assert_close(found, F.linear(inputs, layer.weight, layer.bias))
    assert any("linear" in name for name in called), called
    assert not any("mkldnn" in name or "autograd" in name for name in called), called
