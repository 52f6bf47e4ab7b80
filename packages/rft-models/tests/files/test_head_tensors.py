"""Tensors of scalar heads in one file or in several, and files that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rft_core.errors import DataError
from rft_models.files.head_tensors import file_with_tensor, refuse_bias, stored_tensor

WEIGHT = torch.tensor([[1.0, 2.0]])


@pytest.fixture(params=["one file", "several files"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A head with its weight, and another with a bias."""
    score, other = {"score.weight": WEIGHT}, {"value.weight": WEIGHT + 1, "value.bias": torch.zeros(1)}
    if request.param == "one file":
        save_file(score | other, tmp_path / "model.safetensors")
        return tmp_path
    save_file(score, tmp_path / "1.safetensors")
    save_file(other, tmp_path / "2.safetensors")
    places = dict.fromkeys(score, "1.safetensors") | dict.fromkeys(other, "2.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return tmp_path


def test_a_tensor_is_found_by_its_name(model: Path) -> None:
    for name, wanted in (("score.weight", WEIGHT), ("value.weight", WEIGHT + 1)):
        found = stored_tensor(model, name)
        assert found is not None
        assert torch.equal(found, wanted)
    assert stored_tensor(model, "absent.weight") is None
    assert file_with_tensor(model, "absent.weight") is None
    place = file_with_tensor(model, "value.bias")
    assert place is not None
    assert place.name == ("2.safetensors" if (model / "2.safetensors").exists() else "model.safetensors")


def test_a_head_with_a_bias_is_refused(model: Path) -> None:
    refuse_bias(model, "score")
    with pytest.raises(DataError) as caught:
        refuse_bias(model, "value")
    assert caught.value.problem.code == "models.value_head_bias"
    assert caught.value.problem.where == str(file_with_tensor(model, "value.bias"))


def test_a_file_that_is_cut_off_or_absent_is_damaged(model: Path) -> None:
    file = file_with_tensor(model, "score.weight")
    assert file is not None
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError) as caught:
        stored_tensor(model, "score.weight")
    assert (caught.value.problem.code, caught.value.problem.where) == ("models.damaged_weights", str(file))
    file.unlink()
    with pytest.raises(DataError) as caught:
        stored_tensor(model, "score.weight")
    assert caught.value.problem.where == str(file)
