"""Values of a config.json: what no model could have is refused by file and field, before anything is made of it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rft_core.errors import DataError
from rft_models.files.config_values import MOST_TOKENS, check_config, check_sizes, check_token_id
from rft_models.files.directories import checked_model_directory

FILE = Path("m") / "config.json"
NAN = float("nan")
PLAIN = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": None,
    "head_dim": None,
    "pad_token_id": -1,
    "eos_token_id": [2, 3],
    "rope_theta": 10000,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
    "layer_types": ["full_attention"],
    "something_else": [NAN, {"x": "y"}],
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
ODD: list[tuple[str, Any]] = [
    *((field, value) for field in SIZES for value in (-1, 0, 2**31, 2**62, "x", NAN, 1.5, True, {})),
    *(("num_key_value_heads", value) for value in (-1, 0, 2**31, "x", NAN)),
    *(("max_position_embeddings", value) for value in (-1, "x", NAN, [1], True)),
    *(("rope_theta", value) for value in (-1, 0, "x", NAN, float("inf"), [1])),
    *(("rms_norm_eps", value) for value in (-1, 0, "x", NAN, [1])),
    *((field, value) for field in ("rope_scaling", "rope_parameters") for value in ("x", [1], 3)),
    *(("tie_word_embeddings", value) for value in ("x", [1], 2)),
    *((field, value) for field in ("dtype", "torch_dtype") for value in ("x", [1], "nn", 2, {})),
    *(("architectures", value) for value in ("x", [1], [None], {})),
    *(("layer_types", value) for value in ("x", [1], {})),
    *(("model_type", value) for value in (1, [], {})),
    *((f"{name}_token_id", value) for name in ("eos", "bos", "pad") for value in (2**31, -5, "x", [2**40], NAN, True)),
    ("pad_token_id", 32000),
    *(("text_config", value) for value in ("x", [1])),
    ("quantization_config", "x"),
    ("transformers_weights", "weights.bin"),
]


def refused(config: dict[str, Any]) -> tuple[str, str, str]:
    with pytest.raises(DataError) as caught:
        check_config(FILE, config)
    problem = caught.value.problem
    return problem.code, problem.where, problem.what


def test_a_usual_configuration_passes() -> None:
    one_a_layer = {"intermediate_size": [64, 128]}
    for config in (PLAIN, {}, dict.fromkeys(PLAIN), one_a_layer):
        given = copy.deepcopy(config)
        check_config(FILE, given)
        assert given == config, "what is read is not changed"
    assert "intermediate_size" in refused({"intermediate_size": 0})[2]


@pytest.mark.parametrize(("field", "value"), ODD)
def test_a_value_that_no_model_has_is_refused_by_file_and_field(field: str, value: Any) -> None:
    for prefix, config in (("", PLAIN | {field: value}), ("text_config.", {"text_config": PLAIN | {field: value}})):
        code, where, what = refused(config)
        assert (code, where) == ("models.config_value", f"{FILE}: {prefix}{field}")
        assert what.startswith(f"{prefix}{field} = ")
        assert "allowed: " in what


@pytest.mark.parametrize(("inside", "value"), [("factor", "a"), ("factor", -1), ("rope_theta", "x"), ("rope_type", 3)])
def test_values_inside_the_positions_are_named_too(inside: str, value: Any) -> None:
    assert refused({"rope_scaling": {inside: value}})[1] == f"{FILE}: rope_scaling.{inside}"


def test_sizes_that_the_weights_cannot_have_are_refused_before_memory_is_taken_for_them() -> None:
    check_sizes(FILE, PLAIN, 32000 * 64 // 2)
    for config in (PLAIN, {"text_config": PLAIN}):
        with pytest.raises(DataError) as caught:
            check_sizes(FILE, config, 32000 * 64 // 2 - 1)
        assert caught.value.problem.where == f"{FILE}: vocab_size"
        assert "at most 31999," in caught.value.problem.what


def test_token_ids_of_other_files_are_bounded_alike() -> None:
    check_token_id(FILE, "eos_token_id", MOST_TOKENS - 1)
    with pytest.raises(DataError) as caught:
        check_token_id(FILE, "eos_token_id", [1, MOST_TOKENS])
    assert caught.value.problem.code == "models.config_value"


def test_a_directory_with_such_a_value_is_refused_whatever_loads_it(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors")
    for change, where in ((-1, "config.json: hidden_size"), (64, "config.json: vocab_size")):
        (tmp_path / "config.json").write_text(json.dumps(PLAIN | {"hidden_size": change}))
        with pytest.raises(DataError) as caught:
            checked_model_directory(tmp_path)
        assert caught.value.problem.where.endswith(where)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": [1]}))
    with pytest.raises(DataError) as caught:
        checked_model_directory(tmp_path)
    assert caught.value.problem.where.endswith("index.json: weight_map")
