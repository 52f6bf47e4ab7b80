"""Which products go to oneDNN, with which operands, and that their gradients are torch's.

The operator is a double that computes the same and has no gradient, so that a build of torch without it shows the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rft_models.layers import fast_linear as module
from rft_models.layers.fast_linear import FastLinear, linear, product_nt, product_tn, use_fast_linears

Calls = list[tuple[Tensor, Tensor, Tensor | None]]


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """The operands of every call of the operator, after the one that tries it."""
    calls: Calls = []

    def operator(inputs: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        assert rest == ("none", [], ""), "nothing is applied to the product"
        calls.append((inputs, weight, bias))
        with torch.no_grad():
            return F.linear(inputs, weight, bias).detach()

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", operator, raising=False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    module._onednn_answers.cache_clear()
    assert module._onednn_answers()
    calls.clear()
    yield calls
    module._onednn_answers.cache_clear()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products of a few numbers go there too."""
    monkeypatch.setattr(module, "_FEW_PRODUCTS", 1)
    monkeypatch.setattr(module, "_FEW_PRODUCTS_OF_SMALL", 1)


@pytest.mark.parametrize(("shape", "goes"), [((4, 256), True), ((2, 2, 256), True), ((3, 256), False)])
def test_products_of_a_million_multiplications_go_there(onednn: Calls, shape: tuple[int, ...], goes: bool) -> None:
    inputs, weight = torch.ones(shape), torch.ones(1024, 256)  # 4 x 256 x 1024 is 2 to the 20th
    assert float(linear(inputs, weight).sum()) == inputs.numel() * 1024
    assert len(onednn) == goes


@pytest.mark.parametrize(("rows", "goes"), [(512, True), (511, False)])
def test_products_with_a_small_weight_go_there_from_eight_million_on(onednn: Calls, rows: int, goes: bool) -> None:
    linear(torch.ones(rows, 64), torch.ones(256, 64))  # 512 x 64 x 256 is 2 to the 23rd
    assert len(onednn) == goes


def test_what_the_operator_does_not_take_goes_to_torch(onednn: Calls) -> None:
    inputs, weight = torch.ones(512, 64), torch.ones(256, 64)
    linear(inputs, weight, torch.zeros(256))
    assert len(onednn) == 1
    for dtype in (torch.float64, torch.bfloat16):
        assert linear(inputs.to(dtype), weight.to(dtype)).dtype is dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(inputs, weight).dtype is torch.bfloat16
    cut = torch.ones(256, 64)
    cut.placements = ()  # type: ignore[attr-defined]
    linear(inputs, cut)
    product_nt(inputs, cut)
    assert len(onednn) == 1


@pytest.mark.parametrize(
    "answer",
    [
        lambda inputs, weight, bias, *_: inputs @ weight.t(),
        lambda inputs, weight, bias, *_: F.linear(inputs, weight, bias) + 1,
        lambda inputs, weight, bias: F.linear(inputs, weight, bias),
    ],
)
def test_an_operator_that_is_another_one_is_not_used(
    onednn: Calls, monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", answer)
    module._onednn_answers.cache_clear()
    assert not module._onednn_answers()
    assert float(linear(torch.ones(64, 64), torch.ones(256, 64)).sum()) == 64 * 64 * 256
    assert not onednn


def test_without_onednn_nothing_is_tried(onednn: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    module._onednn_answers.cache_clear()
    assert not module._onednn_answers()
    assert not onednn


def test_torchs_own_operator_answers_where_torch_has_onednn() -> None:
    module._onednn_answers.cache_clear()
    assert module._onednn_answers() == torch.backends.mkldnn.is_available()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("shape", [(5, 3), (2, 4, 3)])
@pytest.mark.parametrize("trained", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 0, 0)])
def test_values_and_gradients_are_torchs(onednn: Calls, shape: tuple[int, ...], trained: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(2)
    given = [
        torch.randn(size, generator=generator).requires_grad_(bool(on))
        for size, on in zip((shape, (7, 3), (7,)), trained, strict=True)
    ]
    leaves = [tensor for tensor in given if tensor.requires_grad]
    found, expected = linear(*given), F.linear(*given)
    assert len(onednn) == 1
    assert onednn[0][0].data_ptr() == given[0].data_ptr()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert found.requires_grad == any(trained)
    if leaves:
        upstream = torch.randn(expected.shape, generator=generator)
        theirs = torch.autograd.grad(expected, leaves, upstream)
        for one, other in zip(torch.autograd.grad(found, leaves, upstream), theirs, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
        assert len(onednn) == 1 + trained[0] + trained[1], "no product for what needs no gradient"
    with torch.no_grad():
        assert not linear(*given).requires_grad
    bare = linear(*given[:2])
    torch.testing.assert_close(bare, F.linear(*given[:2]), atol=1e-6, rtol=1e-6)
    if trained[1]:
        torch.autograd.grad(bare.sum(), given[1])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("num_left", "num_right"), [(4, 6), (6, 4), (5, 5)])
def test_weight_gradients_are_contiguous_with_the_wide_side_as_columns(
    onednn: Calls, num_left: int, num_right: int
) -> None:
    generator = torch.Generator().manual_seed(2)
    left, right = (torch.randn(3, size, generator=generator) for size in (num_left, num_right))
    expected = left.T @ right
    found = product_tn(left, right)
    torch.testing.assert_close(found, expected)
    assert found.is_contiguous()
    first = right if num_left > num_right else left
    assert onednn[-1][0].data_ptr() == first.data_ptr()
    assert onednn[-1][0].shape == first.T.shape
    for slab in (torch.full_like(expected, torch.nan), torch.full((2 * num_left, num_right), torch.nan)[::2]):
        assert product_tn(left, right, out_NK=slab).data_ptr() == slab.data_ptr()
        torch.testing.assert_close(slab, expected)
    torch.testing.assert_close(product_nt(left.T, right.T), expected)
    assert len(onednn) == 4


def test_small_weight_gradients_are_torchs_and_written_where_they_belong(onednn: Calls) -> None:
    left, right = torch.ones(3, 4), torch.full((3, 2), 2.0)
    slab = torch.full((4, 2), torch.nan)
    product_tn(left, right, out_NK=slab)
    assert slab.tolist() == product_tn(left, right).tolist() == [[6.0, 6.0]] * 4
    assert not onednn


@pytest.mark.usefixtures("small")
def test_every_plain_layer_computes_so(onednn: Calls) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2, bias=False)), nn.ReLU())
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(2))
    expected = model(inputs)
    assert use_fast_linears(model) == 2
    assert use_fast_linears(model) == 0
    assert isinstance(model[0], FastLinear)
    torch.testing.assert_close(model(inputs), expected)
    assert [weight.shape for _, weight, _ in onednn] == [(4, 3), (2, 4)]
    assert [bias is None for _, _, bias in onednn] == [False, True]
