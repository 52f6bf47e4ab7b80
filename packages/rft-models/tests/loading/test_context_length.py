"""What a plan reads of a model directory: its kind, that of its decoder, and how long a sequence may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import DataError
from rft_models.loading.context_length import ModelFacts, model_facts


def directory(path: Path, config: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_text("")
    return path


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ({"model_type": "llama", "max_position_embeddings": 64}, ModelFacts("llama", 64)),
        ({"model_type": "gpt2", "n_positions": 32, "max_position_embeddings": 0}, ModelFacts("gpt2", 32)),
        ({"model_type": "llama", "seq_length": 16, "max_sequence_length": 24}, ModelFacts("llama", 16)),
        ({"model_type": "llama"}, ModelFacts("llama", 2**31 - 1)),
        (
            {"model_type": "llava", "max_position_embeddings": 5, "text_config": {"max_position_embeddings": 9}},
            ModelFacts("llava", 9, "llama"),
        ),
        (
            {"model_type": "qwen2_vl", "text_config": {"model_type": "qwen2_vl_text", "n_positions": 7}},
            ModelFacts("qwen2_vl", 7, "qwen2_vl_text"),
        ),
    ],
)
def test_facts_are_those_of_the_configuration(config: dict[str, Any], facts: ModelFacts, tmp_path: Path) -> None:
    assert model_facts(directory(tmp_path, config)) == facts


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8"])
def test_quantized_weights_are_refused_before_they_are_loaded(tmp_path: Path, method: str) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": method}}
    with pytest.raises(DataError) as caught:
        model_facts(directory(tmp_path, config))
    assert caught.value.problem.code == "models.quantized"
    assert method in caught.value.problem.what
    (tmp_path / "plain").mkdir()
    assert model_facts(directory(tmp_path / "plain", config | {"quantization_config": None})).model_type == "llama"


def test_a_model_of_another_kind_has_no_facts(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        model_facts(directory(tmp_path, {"model_type": "bert", "architectures": ["BertModel"]}))
    assert (caught.value.problem.code, caught.value.problem.where) == ("models.not_causal", f"{tmp_path}/config.json")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(DataError) as caught:
        model_facts(tmp_path)
    assert caught.value.problem.code == "models.no_weights"
