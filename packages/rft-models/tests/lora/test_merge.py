"""The matrix with an adapter folded in, and the stream of tensors of a model with adapters folded into its own."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rft_models.lora.merge import (
    MergeFacts,
    base_layer,
    effective_weight,
    is_adapted,
    is_adapter_tensor,
    merge_into_base,
    merged_weight,
    split_name,
    to_plain_tensor,
)

OUT, IN, RANK = 3, 4, 2


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


BASE, DOWN, UP, LENGTH = drawn(OUT, IN), drawn(RANK, IN, seed=1), drawn(OUT, RANK, seed=2), drawn(OUT, seed=3).abs()


def reference(scale: float, length: Tensor | None) -> Tensor:
    rows: list[Tensor] = []
    for n in range(OUT):
        row = BASE[n] + scale * sum((UP[n, r] * DOWN[r] for r in range(RANK)), torch.zeros(IN, dtype=torch.float64))
        rows.append(row if length is None else row * length[n] / row.square().sum().sqrt())
    return torch.stack(rows)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("length", [None, LENGTH])
def test_a_merged_matrix_is_that_of_the_equations(length: Tensor | None, transposed: bool) -> None:
    base = BASE.t() if transposed else BASE
    found = merged_weight(base, DOWN, UP, length, 0.7, transposed=transposed)
    torch.testing.assert_close(found, reference(0.7, length).t() if transposed else reference(0.7, length))
    assert found.is_contiguous()
    torch.testing.assert_close(merged_weight(BASE, DOWN, UP, length, 0.7), reference(0.7, length))


def test_a_merged_matrix_is_rounded_once_and_has_the_type_of_the_base() -> None:
    base, down, up = BASE.bfloat16(), DOWN.float(), UP.float() * 1e-3
    found = merged_weight(base, down, up, None, 0.5)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, torch.addmm(base.float(), up, down, alpha=0.5).bfloat16())
    assert torch.equal(base, BASE.bfloat16()), "the base stays"


class Adapted(nn.Module):
    """A layer as peft makes it."""

    def __init__(self, *, length: bool, transposed: bool | None) -> None:
        super().__init__()
        self.base_layer = nn.Linear(IN, OUT, bias=False)
        self.base_layer.weight = nn.Parameter(BASE.t().contiguous() if transposed else BASE.clone())
        self.lora_A = {"default": SimpleNamespace(weight=nn.Parameter(DOWN))}
        self.lora_B = {"default": SimpleNamespace(weight=nn.Parameter(UP))}
        self.lora_magnitude_vector = {"default": SimpleNamespace(weight=nn.Parameter(LENGTH))} if length else {}
        self.scaling = {"default": 0.3}
        if transposed is not None:
            self.fan_in_fan_out = transposed


@pytest.mark.parametrize("transposed", [None, False, True])
@pytest.mark.parametrize("length", [False, True])
def test_the_effective_matrix_of_a_layer_has_its_adapter_folded_in(length: bool, transposed: bool | None) -> None:
    layer = Adapted(length=length, transposed=transposed)
    expected = reference(0.3, LENGTH if length else None)
    found = effective_weight(layer)
    torch.testing.assert_close(found, expected.t() if transposed else expected)
    assert not found.requires_grad
    assert base_layer(layer) is layer.base_layer


def test_a_layer_without_an_adapter_is_its_own_base() -> None:
    plain = nn.Linear(2, 2)
    assert effective_weight(plain) is plain.weight
    assert base_layer(plain) is plain
    assert not is_adapted(plain)
    assert not is_adapted(SimpleNamespace(base_layer=plain))
    assert not is_adapted(SimpleNamespace(lora_A=plain))
    assert is_adapted(SimpleNamespace(base_layer=plain, lora_A=plain))


def test_a_tensor_in_four_bits_is_multiplied_out_with_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: Any = nn.Parameter(torch.ones(2, dtype=torch.float64))
    assert torch.equal(to_plain_tensor(packed), packed.detach())
    assert not to_plain_tensor(packed).requires_grad
    packed.quant_state = "state"

    def dequantize(data: Tensor, state: str) -> tuple[Tensor, str]:
        assert not data.requires_grad
        return data * 3, state

    library = SimpleNamespace(functional=SimpleNamespace(dequantize_4bit=dequantize))
    monkeypatch.setitem(sys.modules, "bitsandbytes", library)  # type: ignore[arg-type]
    found: Any = to_plain_tensor(packed)
    assert found[1] == "state"
    assert torch.equal(found[0], torch.full((2,), 3.0, dtype=torch.float64))


FACTS = {
    "a.q": MergeFacts(scale=0.5, has_length=False, transposed=False),
    "a.d": MergeFacts(scale=2.0, has_length=True, transposed=False),
    "a.t": MergeFacts(scale=-1.0, has_length=False, transposed=True),
}


def stream() -> list[tuple[str, Tensor]]:
    bias = torch.ones(OUT)
    return [
        ("embed.weight", bias),
        ("a.q.base_layer.weight", BASE),
        ("a.q.base_layer.bias", bias),
        ("a.d.base_layer.weight", BASE),
        ("a.q.lora_A.default.weight", DOWN),
        ("other.base_layer.weight", bias),
        ("a.q.lora_B.default.weight", UP),
        ("a.d.lora_B.default.weight", UP),
        ("a.d.lora_A.default.weight", DOWN),
        ("a.d.lora_magnitude_vector.default.weight", LENGTH),
        ("a.t.base_layer.weight", BASE.t().contiguous()),
        ("a.t.lora_A.default.weight", DOWN),
        ("a.t.lora_B.default.weight", UP),
    ]


def test_a_stream_gets_file_names_and_each_matrix_as_soon_as_its_adapter_has_come() -> None:
    found = list(merge_into_base(stream(), FACTS))
    assert [name for name, _ in found] == [
        "embed.weight",
        "a.q.bias",
        "other.base_layer.weight",
        "a.q.weight",
        "a.d.weight",
        "a.t.weight",
    ]
    tensors = dict(found)
    torch.testing.assert_close(tensors["a.q.weight"], reference(0.5, None))
    torch.testing.assert_close(tensors["a.d.weight"], reference(2.0, LENGTH))
    torch.testing.assert_close(tensors["a.t.weight"], reference(-1.0, None).t())


@pytest.mark.parametrize("absent", ["a.d.lora_magnitude_vector.default.weight", "a.t.base_layer.weight"])
def test_a_stream_without_a_part_of_an_adapter_is_an_error(absent: str) -> None:
    with pytest.raises(AssertionError):
        list(merge_into_base([pair for pair in stream() if pair[0] != absent], FACTS))


def test_names_are_split_into_the_layer_and_the_part() -> None:
    parts = [split_name(name, FACTS) for name, _ in stream()[:10]]
    assert parts == [
        (None, "embed.weight"),
        ("a.q", "base"),
        ("a.q", "bias"),
        ("a.d", "base"),
        ("a.q", "down"),
        (None, "other.base_layer.weight"),
        ("a.q", "up"),
        ("a.d", "up"),
        ("a.d", "down"),
        ("a.d", "length"),
    ]
    of_adapters = [name for name, _ in stream() if is_adapter_tensor(name, FACTS)]
    assert of_adapters == [name for name, _ in stream() if ".lora_" in name]
