"""A resume of pre-training with another decoder is refused by the setting that differs, and touches nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rft_models.policy.causal_policy import CausalPolicy
from rft_models.settings import DecoderSettings

pytestmark = pytest.mark.xdist_group("pretrain_resume")

TOY = "--device cpu --hidden_size 16 --num_layers 2 --num_heads 2 --max_seq_len 24 --tokenizer char --max_steps 1"
OTHERS = {
    "family": "llama",
    "hidden_size": "32",
    "num_layers": "3",
    "num_heads": "4",
    "num_kv_heads": "1",
    "ffn_hidden_size": "32",
    "use_glu": "false",
    "dropout": "0.1",
    "vocab_size": "300",
    "max_seq_len": "32",
    "tie_embeddings": "false",
    "init_std": "0.01",
    "use_moe": "true",
    "num_experts": "4",
    "top_k": "1",
    "shared_experts": "1",
    "tokenizer": "byte",
    "tokenizer_size": "300",
}
"""Another value of each."""
NEEDS = {
    "num_experts": "--use_moe",
    "top_k": "--use_moe",
    "shared_experts": "--use_moe",
    "tokenizer_size": "--tokenizer bpe",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, call: Callable[..., Any]) -> Path:
    """A run of one step."""
    folder = tmp_path_factory.mktemp("shapes")
    (folder / "text.txt").write_text("Before we proceed any further, hear me speak. " * 10)
    words = ["--prompt_data", folder / "text.txt", "--save_path", folder / "run", *TOY.split()]
    outcome = call("pretrain", *words, "--data_store_path", folder / "tokens")
    assert outcome.code == 0, outcome.err
    return folder / "run"


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a model is made."""

    def made(*parts: Any, **more: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(CausalPolicy, "__init__", made)


def files_of(folder: Path) -> dict[Path, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in paths if "logs" not in path.parts and "bundle" not in path.name}


def test_each_setting_of_a_decoder_has_another_value_here() -> None:
    assert set(OTHERS) == {item.name for item in fields(DecoderSettings)} | {"tokenizer", "tokenizer_size"}


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("name", OTHERS)
def test_another_decoder_is_refused_with_the_setting_and_both_values(
    name: str, run: Path, call: Callable[..., Any]
) -> None:
    before = files_of(run)
    words = [f"--{name}", OTHERS[name], *NEEDS.get(name, "").split()]
    outcome = call("resume", run, *words, "--json_errors")
    problem = outcome.problem
    assert (outcome.code, problem["code"]) == (2, "identity.fixed"), problem
    # what a setting needs beside it differs too, and is told first
    first, value = [*NEEDS.get(name, f"--{name} {OTHERS[name]}").split(), "true"][:2]
    assert problem["what"].startswith(f"a resume cannot change {first[2:]} from ")
    assert problem["what"].endswith(f" to {value}")
    assert problem["do"] == f"leave {first} out"
    assert files_of(run) == before
