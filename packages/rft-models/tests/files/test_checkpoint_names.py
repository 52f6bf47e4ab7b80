"""Tensors one by one under the names and in the shapes of the files that `save_pretrained` writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rft_models.files.checkpoint_names import to_checkpoint_names

Build = Callable[..., Any]


@pytest.mark.parametrize("model_type", ["llama", "qwen2_moe", "qwen3_moe", "mixtral"])
def test_names_and_values_are_those_of_the_files(model_type: str, tiny_model: Build, tmp_path: Path) -> None:
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    found = dict(to_checkpoint_names(model, model.named_parameters)())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    has_experts = any(".experts.0." in name for name in found)
    assert has_experts == (model_type != "llama")
