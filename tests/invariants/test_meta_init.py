"""Ranks that read their blocks alone have the weights, and take the step, of ranks that loaded the whole model."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.meta_ranks import CASES

from rft_core.errors import DataError, OptionsError
from rft_models.policy.load_on_meta import load_on_meta
from rft_models.tiny_models.text import build_character_model

pytestmark = pytest.mark.xdist_group("strategies")
PROGRAM = Path(__file__).parents[1] / "support" / "meta_ranks.py"
SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 10}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
}


def make_model(folder: Path, model_type: str, **specific: Any) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES, **HEADS, **specific))
    model.generation_config.eos_token_id = 7
    model.save_pretrained(folder, max_shard_size="400KB")
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """In several files each."""
    folder = tmp_path_factory.mktemp("models")
    made = {name: make_model(folder / name, name, **specific) for name, specific in MODELS.items()}
    assert all(len(list(path.glob("*.safetensors"))) > 1 for path in made.values())
    return made


@pytest.fixture(scope="module")
def results(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    out = tmp_path_factory.mktemp("meta")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": "2", "NCCL_TIMEOUT": "120"}
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parents[1])}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(out), *map(str, models.values())],
            env={**os.environ, **shared, "RANK": f"{rank}"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(error[-3000:] for error in errors)
    return [json.loads((out / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_blocks_forward_and_step_are_those_of_a_model_that_was_loaded_whole(
    results: list[dict[str, Any]], model: str, case: str
) -> None:
    for found in results:
        told = found[f"{model} {case}"]
        assert told["same"], "weights and buffers to the bit"
        assert told["same_forward"]
        assert told["same_norm"]
        assert told["same_after"]
        assert told["eos"] == 7, "the settings of generation come along"


@pytest.mark.parametrize("model", MODELS)
def test_no_rank_ever_has_the_whole_model(models: dict[str, Path], results: list[dict[str, Any]], model: str) -> None:
    """Bytes of live tensors while it is made, filled and verified, where the whole is 4 bytes a parameter."""
    whole = sum(t.numel() * 4 for path in models[model].glob("*.safetensors") for t in load_file(path).values())
    for found in results:
        told = found[f"{model} blocks"]
        assert told["peak"] < whole < told["whole_peak"]


def test_files_whose_tensors_are_not_those_of_the_model_are_refused_by_name(tmp_path: Path) -> None:
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
    folder = build_character_model(tmp_path / "tokenizer", hidden=32, layers=1, heads=2, ffn=32, kv_heads=1)
    source = make_model(tmp_path / "moe", "qwen3_moe", **mixture)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (source / file).write_bytes((folder / file).read_bytes())
    with pytest.raises(OptionsError) as caught:
        load_on_meta(source)
    assert caught.value.problem.code == "models.meta_names"
    assert "experts" in caught.value.problem.what
    weights = load_file(folder / "model.safetensors")
    name = "model.norm.weight"
    save_file(weights | {name: torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OptionsError, match=r"the first is model\.norm\.weight \[32\] \(\[3\]\)") as caught:
        load_on_meta(folder)
    assert caught.value.problem.code == "models.meta_names"
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(DataError) as caught:
        load_on_meta(folder)
    assert caught.value.problem.code == "models.damaged_weights"
