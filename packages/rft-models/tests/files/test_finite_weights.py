"""Weights that are not numbers are refused with the tensor and the file that hold them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rft_core.errors import DataError
from rft_models.files.finite_weights import is_finite, require_finite
from rft_models.files.safetensors_reader import WeightFiles
from rft_models.policy.load import load_policy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_element_is_enough(dtype: torch.dtype, bad: float) -> None:
    tensor = torch.ones(3, 5, dtype=dtype)
    assert is_finite(tensor)
    tensor[1, 2] = bad
    assert not is_finite(tensor)


@pytest.mark.parametrize(
    "tensor", [torch.zeros(0), torch.tensor([255], dtype=torch.uint8), torch.full((2,), float("nan"), device="meta")]
)
def test_what_holds_no_values_of_its_own_passes(tensor: torch.Tensor) -> None:
    assert is_finite(tensor)


@pytest.fixture
def spoiled(character_directory: Path, tmp_path: Path) -> Path:
    """A model with two NaN and an infinity in one tensor."""
    directory = Path(shutil.copytree(character_directory, tmp_path / "model"))
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, :3] = torch.tensor([float("nan"), float("nan"), float("inf")])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def require_named(error: DataError, spoiled: Path) -> None:
    problem = error.problem
    assert problem.code == "models.weights_not_finite"
    assert "model.layers.1.mlp.up_proj.weight" in problem.what
    assert "2 NaN and 1 infinite" in problem.what
    assert problem.where == str(spoiled / "model.safetensors")
    assert "copy model.safetensors of the model again" in problem.do


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_with_such_weights_is_refused_by_tensor_and_file(spoiled: Path, dtype: torch.dtype) -> None:
    with pytest.raises(DataError) as caught:
        load_policy(spoiled, dtype=dtype)
    require_named(caught.value, spoiled)


def test_a_block_of_such_weights_is_refused_where_it_is_read(spoiled: Path) -> None:
    files = WeightFiles(spoiled)
    shape = load_file(spoiled / "model.safetensors")["model.layers.1.mlp.up_proj.weight"].shape
    files.block("model.layers.1.mlp.up_proj.weight", start=(4, 0), shape=(2, shape[1]))
    with pytest.raises(DataError) as caught:
        files.block("model.layers.1.mlp.up_proj.weight", start=(2, 0), shape=(2, shape[1]))
    require_named(caught.value, spoiled)


def test_weights_that_overflow_in_another_type_are_told_apart_from_those_of_a_file(character_directory: Path) -> None:
    weight = torch.full((2,), 1e6).to(torch.float16)
    with pytest.raises(DataError) as caught:
        require_finite([("head", weight)], character_directory)
    assert caught.value.problem.code == "models.weights_overflow"
    assert "head" in caught.value.problem.what
