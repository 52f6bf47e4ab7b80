"""Directories that load, and what is said about those that do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rft_core.errors import DataError, OptionsError, PreflightError, RftError
from rft_core.packed_tokens import PackedTokens
from rft_models.policy.load import load_policy, load_reference
from rft_models.tokenization.tokenizer import load_tokenizer


@pytest.fixture
def copied(character_directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(character_directory, tmp_path / "model-a"))


def edit_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


def problem_of(error: RftError) -> str:
    assert error.problem.do
    assert error.problem.why
    return f"{error.problem.code} {error.problem.what} | {error.problem.do}"


def test_saved_and_loaded_again_is_bit_identical(character_directory: Path, tmp_path: Path) -> None:
    policy = load_policy(character_directory)
    policy.save_pretrained(tmp_path / "once")
    again = load_policy(tmp_path / "once")
    for (name, ours), (other, theirs) in zip(policy.named_parameters(), again.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(ours, theirs)
    again.save_pretrained(tmp_path / "twice")
    files = sorted(entry.name for entry in (tmp_path / "once").iterdir())
    assert files == sorted(entry.name for entry in (tmp_path / "twice").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(files)
    for name in files:
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes(), name


def test_transformers_itself_loads_what_was_saved(character_directory: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = load_policy(character_directory)
    policy.save_pretrained(tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = torch.tensor(tokenizer.encode("12+30=42"))
    with torch.no_grad():
        theirs = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
        ours, _ = policy.token_logprobs(
            PackedTokens(ids, torch.arange(8), torch.zeros(8, dtype=torch.int64), torch.ones(8) > 0)
        )
    torch.testing.assert_close(ours[1:], theirs, atol=1e-5, rtol=0)


def test_parameters_are_counted_once_where_tied(character_directory: Path) -> None:
    policy = load_policy(character_directory)
    assert policy.num_parameters == sum(
        tensor.numel() for tensor in load_file(character_directory / "model.safetensors").values()
    )


def test_reference_is_frozen_and_in_eval_mode(character_directory: Path) -> None:
    reference = load_reference(character_directory)
    assert not any(parameter.requires_grad for _, parameter in reference.named_parameters())
    assert not reference.model.training


@pytest.mark.parametrize("attention", ["packed", "native"])
def test_both_attentions_give_the_same_logprobs(attention: str, character_directory: Path) -> None:
    policy = load_policy(character_directory, attention=attention)  # pyright: ignore[reportArgumentType]
    assert policy.packed == (attention == "packed")
    ids = torch.tensor([2, 5, 3, 4, 6, 7])
    positions, segments = torch.tensor([0, 1, 2, 3, 0, 1]), torch.tensor([0, 0, 0, 0, 1, 1])
    found, _ = policy.token_logprobs(PackedTokens(ids, positions, segments, ids > 0))
    expected, _ = load_policy(character_directory).token_logprobs(PackedTokens(ids, positions, segments, ids > 0))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_absent_directory_names_the_nearest(copied: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_policy(copied.parent / "model-b")
    assert str(copied) in problem_of(caught.value)


def test_a_file_in_place_of_a_directory_is_said(copied: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_policy(copied / "config.json")
    assert caught.value.problem.code == "models.no_directory"


def test_absent_config_points_to_a_directory_below(copied: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_policy(copied.parent)
    assert str(copied) in caught.value.problem.do
    assert caught.value.problem.code == "models.no_config"


def test_damaged_config_is_said_with_its_place(copied: Path) -> None:
    (copied / "config.json").write_text('{"model_type": "qwen2",')
    with pytest.raises(DataError, match="line 1") as caught:
        load_policy(copied)
    assert caught.value.problem.code == "models.damaged_json"


def test_absent_weights_are_said(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    with pytest.raises(DataError) as caught:
        load_policy(copied)
    assert caught.value.problem.code == "models.no_weights"


def test_pickled_weights_are_not_opened(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    (copied / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(DataError, match="pickled") as caught:
        load_policy(copied)
    assert caught.value.problem.code == "models.no_weights"


def test_an_absent_shard_is_named(copied: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="model-00001-of-00002") as caught:
        load_policy(copied)
    assert caught.value.problem.code == "models.missing_shard"


def test_cut_off_weights_are_said(copied: Path) -> None:
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-200])
    with pytest.raises(DataError) as caught:
        load_policy(copied)
    assert caught.value.problem.code == "models.damaged_weights"


def test_a_missing_tensor_is_not_replaced_by_random_values(copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"layers\.1\.mlp\.up_proj") as caught:
        load_policy(copied)
    assert caught.value.problem.code == "models.missing_weights"


def test_sizes_that_do_not_fit_the_config_are_refused(copied: Path) -> None:
    edit_config(copied, intermediate_size=64)
    with pytest.raises(DataError) as caught:
        load_policy(copied)
    assert caught.value.problem.code == "models.damaged_weights"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"model_type": "own_thing", "auto_map": {"AutoModelForCausalLM": "x.Y"}}, "models.needs_remote_code"),
        ({"model_type": "own_thing"}, "models.unknown_architecture"),
        ({"model_type": "vit"}, "models.not_causal"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "models.not_causal"),
    ],
)
def test_other_kinds_of_models_are_refused_with_their_reason(changes: dict[str, Any], code: str, copied: Path) -> None:
    edit_config(copied, **changes)
    with pytest.raises(DataError) as caught:
        load_policy(copied)
    assert caught.value.problem.code == code
    assert str(copied) in caught.value.problem.where


def test_absent_and_damaged_tokenizers_are_said(copied: Path) -> None:
    (copied / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError) as caught:
        load_tokenizer(copied)
    assert caught.value.problem.code == "models.tokenizer_damaged"
    (copied / "tokenizer.json").unlink()
    with pytest.raises(DataError) as caught:
        load_policy(copied)
    assert caught.value.problem.code == "models.no_tokenizer"


def test_packed_attention_for_an_unknown_family_is_refused(copied: Path) -> None:
    edit_config(copied, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    with pytest.raises(OptionsError, match="gpt2") as caught:
        load_policy(copied, attention="packed")
    assert caught.value.problem.code == "models.no_packed_attention"


def test_a_head_that_does_more_than_is_known_is_found_out(character_directory: Path) -> None:
    policy = load_policy(character_directory)
    policy.model.lm_head.register_forward_hook(lambda module, args, output: output * 1.01)
    with pytest.raises(PreflightError, match="differ") as caught:
        policy.verify()
    assert caught.value.problem.code == "models.forward_differs"


def test_a_run_in_the_place_of_a_model_leads_to_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (10, 20):
        (tmp_path / "checkpoints" / f"step_{step:06d}" / "model").mkdir(parents=True)
    with pytest.raises(DataError) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.problem.do == f"--pretrain {tmp_path}/checkpoints/step_000020/model"
