"""Matrices laid out once for oneDNN: the same products to the last bit, and which products go there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rft_models.layers import fast_linear as module
from rft_models.layers.fast_linear import PackedMatrix, linear

pytestmark = pytest.mark.skipif(not module._onednn_packs(), reason="this build of torch has no layout of its own")


def matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("num_rows", [1, 2, 65])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_the_same_to_the_last_bit(num_rows: int, with_bias: bool) -> None:
    weight, inputs = matrix(1100, 1000), matrix(num_rows, 1000)
    bias = matrix(1, 1100)[0] if with_bias else None
    packed = PackedMatrix(weight)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(packed.linear(inputs, bias), linear(inputs, weight, bias))
    # one row gains nothing
    assert packed.packed_bytes == (4 * weight.numel() if num_rows > 1 else 0)


def test_a_matrix_is_laid_out_once_and_only_for_products_that_go_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []
    layout = module._packed
    monkeypatch.setattr(module, "_packed", lambda weight: made.append(weight) or layout(weight))
    packed = PackedMatrix(matrix(512, 320))
    with torch.no_grad():
        packed.linear(matrix(6, 320))
        assert (len(made), packed.packed_bytes) == (0, 0)
        packed.linear(matrix(7, 320))
        packed.linear(matrix(80, 320))
        # small products still go to torch
        assert torch.equal(packed.linear(matrix(3, 320)), torch.nn.functional.linear(matrix(3, 320), matrix(512, 320)))
    assert len(made) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_go_to_torch(dtype: torch.dtype) -> None:
    weight, inputs = matrix(512, 64).to(dtype), matrix(64, 64).to(dtype)
    packed = PackedMatrix(weight)
    with torch.no_grad():
        assert torch.equal(packed.linear(inputs), torch.nn.functional.linear(inputs, weight))
    assert packed.packed_bytes == 0


def test_gradients_flow_and_autocast_holds_after_the_layout_was_made() -> None:
    weight, inputs = matrix(1100, 1000), matrix(8, 1000)
    packed = PackedMatrix(weight)
    with torch.no_grad():
        packed.linear(inputs)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert packed.linear(inputs).dtype is torch.bfloat16
    inputs.requires_grad_()
    packed.linear(inputs).sum().backward()
    torch.testing.assert_close(inputs.grad, weight.sum(0).expand(8, -1), atol=1e-3, rtol=1e-4)


def test_a_build_without_the_operator_multiplies_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Tensor:
        raise AttributeError("no such operator")

    monkeypatch.setattr(module, "_packed", missing)
    module._onednn_packs.cache_clear()
    packed = PackedMatrix(matrix(1100, 1000))
    try:
        with torch.no_grad():
            assert torch.equal(packed.linear(matrix(8, 1000)), linear(matrix(8, 1000), matrix(1100, 1000)))
    finally:
        module._onednn_packs.cache_clear()
    assert packed.packed_bytes == 0
