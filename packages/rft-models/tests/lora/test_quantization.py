"""Weights in 4 bits: where they can be had, what transformers is asked for, and what is written of such a model."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rft_core.errors import OptionsError, PreflightError
from rft_models.lora.quantization import four_bit_arguments, is_quantized, saved_as_numbers, state_of


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU as far as anyone asks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library, whose numbers are multiplied out by their scale."""
    library: Any = ModuleType("bitsandbytes")
    library.__spec__ = ModuleSpec("bitsandbytes", None)
    library.functional = SimpleNamespace(dequantize_4bit=lambda data, state: data.float() * state)
    monkeypatch.setitem(sys.modules, "bitsandbytes", library)


class Quantized(nn.Module):
    """Two tied matrices with a scale, a vector without one, and a buffer that only kernels read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 1, bias=False)
        self.first.weight = nn.Parameter(torch.tensor([[1.0, -2.0]]))
        self.first.weight.quant_state = 3.0  # pyright: ignore[reportAttributeAccessIssue]
        self.second = nn.Linear(2, 1, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.LayerNorm(2, bias=False)
        self.register_buffer("absmax", torch.zeros(4))
        self.hf_quantizer: Any = "the quantizer"
        self.config: Any = SimpleNamespace(quantization_config="how it was chosen", hidden_size=2)


def lists(state: dict[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in state.items()}


@pytest.mark.usefixtures("gpu", "bitsandbytes")
@pytest.mark.parametrize("device", ["cuda:1", torch.device("cuda", 1)])
def test_four_bits_are_nf4_with_scales_in_eight_and_products_in_the_chosen_type(device: Any) -> None:
    arguments = four_bit_arguments(device, torch.bfloat16)
    assert arguments["device_map"] == {"": torch.device("cuda:1")}
    chosen = arguments.pop("quantization_config")
    assert list(arguments) == ["device_map"]
    assert (chosen.load_in_4bit, chosen.load_in_8bit) == (True, False)
    assert (chosen.bnb_4bit_quant_type, chosen.bnb_4bit_use_double_quant) == ("nf4", True)
    assert chosen.bnb_4bit_compute_dtype is torch.bfloat16
    other = four_bit_arguments("cuda", torch.float16)
    assert other["quantization_config"].bnb_4bit_compute_dtype is torch.float16
    assert other["device_map"] == {"": torch.device("cuda")}


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize(("device", "has_gpu"), [("cpu", True), ("cuda", False), ("cpu", False)])
def test_four_bits_need_a_gpu_that_is_there_and_chosen(
    device: str, has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with pytest.raises(OptionsError) as caught:
        four_bit_arguments(device, torch.bfloat16)
    assert caught.value.problem.code == "adapters.4bit_device"
    assert device in caught.value.problem.what


@pytest.mark.usefixtures("gpu")
def test_four_bits_need_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(PreflightError) as caught:
        four_bit_arguments("cuda", torch.bfloat16)
    assert caught.value.problem.code == "adapters.no_bitsandbytes"


@pytest.mark.usefixtures("bitsandbytes")
def test_the_state_of_a_quantized_model_is_its_parameters_as_numbers_under_every_name() -> None:
    model = Quantized()
    assert is_quantized(model)
    matrix = [[3.0, -6.0]]
    state = state_of(model)
    assert lists(state) == {"first.weight": matrix, "second.weight": matrix, "norm.weight": [1.0, 1.0]}
    assert not any(tensor.requires_grad for tensor in state.values())


@pytest.mark.parametrize("quantizer", ["absent", None])
def test_the_state_of_an_ordinary_model_is_its_own(quantizer: str | None) -> None:
    model = Quantized()
    model.hf_quantizer = quantizer
    if quantizer == "absent":
        del model.hf_quantizer
    assert not is_quantized(model)
    matrix = [[1.0, -2.0]]
    state = lists(state_of(model))
    assert state == {"first.weight": matrix, "second.weight": matrix, "norm.weight": [1.0, 1.0], "absmax": [0.0] * 4}


def test_a_quantized_model_is_described_as_an_ordinary_one_while_it_is_written_and_not_afterwards() -> None:
    model = Quantized()
    whole = vars(model.config).copy()
    with saved_as_numbers(model):
        assert not is_quantized(model)
        assert vars(model.config) == {"hidden_size": 2}
    assert (model.hf_quantizer, vars(model.config)) == ("the quantizer", whole)
    with pytest.raises(OSError, match="full"), saved_as_numbers(model):  # noqa: PT012 - the body is what fails
        assert not is_quantized(model)
        raise OSError("full")
    assert (model.hf_quantizer, vars(model.config)) == ("the quantizer", whole)


def test_an_ordinary_model_is_written_as_it_is() -> None:
    model = Quantized()
    model.hf_quantizer = None
    whole = vars(model.config).copy()
    with saved_as_numbers(model):
        assert vars(model.config) == whole
    assert vars(model.config) == whole
