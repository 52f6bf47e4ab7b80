"""Adapters and merged weights in files: read by peft and transformers, exact to the bit, and never mixed up."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rft_core.errors import DataError
from rft_core.packed_tokens import PackedTokens
from rft_models.critic.causal_critic import load_critic
from rft_models.lora import files
from rft_models.lora.adapters import AdapterRules, rules_of_config
from rft_models.policy.adaptation import add_adapters
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_models.settings import AdapterKind

KINDS: list[AdapterKind] = ["lora", "rslora", "dora"]
IDS = torch.arange(12) * 5 % 13


def logprobs(policy: CausalPolicy) -> Tensor:
    given = (IDS, torch.arange(12), torch.zeros(12, dtype=torch.int64), torch.ones(12, dtype=torch.bool))
    with torch.no_grad():
        return policy.eval().token_logprobs(PackedTokens(*given))[0]


def trained(directory: Path, kind: AdapterKind = "lora", rank: int = 3, seed: int = 0) -> CausalPolicy:
    policy = load_policy(directory)
    adapters = add_adapters(policy, AdapterRules(rank=rank, kind=kind), seed=seed)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, parameter in adapters.named_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return policy


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_is_merged_and_its_adapters_load_in_plain_peft(
    kind: AdapterKind, character_directory: Path, tmp_path: Path
) -> None:
    policy = trained(character_directory, kind)
    policy.save_pretrained(tmp_path / "model")
    expected = logprobs(policy)
    assert {path.name for path in (tmp_path / "model" / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "base.json",
    }
    torch.testing.assert_close(logprobs(load_policy(tmp_path / "model")), expected, atol=1e-5, rtol=1e-5)
    assert not any("lora" in name for name in load_file(tmp_path / "model" / "model.safetensors"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(character_directory)
    through_peft = peft.PeftModel.from_pretrained(base, str(tmp_path / "model" / "adapter"))
    for model in (merged, through_peft):
        found = model(input_ids=IDS[None]).logits[0].log_softmax(-1)[:-1].gather(1, IDS[1:, None])[:, 0]
        torch.testing.assert_close(found, expected[1:], atol=1e-5, rtol=1e-5)


def test_a_copy_of_the_weights_is_written_as_they_were(character_directory: Path, tmp_path: Path) -> None:
    policy = trained(character_directory)
    expected = logprobs(policy)
    write = policy.snapshot(lambda _, tensor: tensor.detach().clone())
    with torch.no_grad():
        for _, parameter in policy.trainable_parameters():
            parameter.zero_()
    write(tmp_path / "model")
    torch.testing.assert_close(logprobs(load_policy(tmp_path / "model")), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_read_back_adapters_are_the_same_to_the_bit(
    kind: AdapterKind, character_directory: Path, tmp_path: Path
) -> None:
    policy = trained(character_directory, kind)
    policy.save_pretrained(tmp_path / "model")
    again = load_policy(character_directory)
    adapters = add_adapters(again, AdapterRules(rank=3, kind=kind), seed=77)
    files.load(adapters, tmp_path / "model" / "adapter")
    assert policy.adapters is not None
    held = dict(policy.adapters.named_parameters())
    assert all(torch.equal(parameter, held[name]) for name, parameter in adapters.named_parameters())
    assert torch.equal(logprobs(again), logprobs(policy))
    config = json.loads((tmp_path / "model" / "adapter" / "adapter_config.json").read_text())
    assert rules_of_config(config, "here").kind == kind
    assert Path(config["base_model_name_or_path"]) == character_directory
    assert files.base_directory(tmp_path / "model" / "adapter") == character_directory


def test_adapters_of_other_weights_or_another_rank_are_refused(character_directory: Path, tmp_path: Path) -> None:
    trained(character_directory).save_pretrained(tmp_path / "model")
    folder = tmp_path / "model" / "adapter"
    other = add_adapters(load_policy(character_directory), AdapterRules(rank=4), seed=0)
    with pytest.raises(DataError) as caught:
        files.load(other, folder)
    assert caught.value.problem.code == "adapters.other_layers"
    assert caught.value.problem.do.startswith("--lora_rank 3 --lora_type lora --target_modules ")
    rounded = load_policy(character_directory, dtype=torch.bfloat16)
    with pytest.raises(DataError) as caught:
        files.load(add_adapters(rounded, AdapterRules(rank=3), seed=0), folder)
    assert caught.value.problem.code == "adapters.other_base"


def test_a_directory_of_adapters_is_no_model_and_says_what_to_do(character_directory: Path, tmp_path: Path) -> None:
    trained(character_directory).save_pretrained(tmp_path / "model")
    folder = tmp_path / "model" / "adapter"
    with pytest.raises(DataError) as caught:
        load_policy(folder)
    assert caught.value.problem.code == "models.adapters_alone"
    assert f"rft-train export {folder}" in caught.value.problem.do


def test_a_base_that_is_gone_is_named(character_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(character_directory, tmp_path / "base")
    trained(tmp_path / "base").save_pretrained(tmp_path / "model")
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(DataError) as caught:
        files.base_directory(tmp_path / "model" / "adapter")
    assert caught.value.problem.code == "adapters.no_base"
    assert str(tmp_path / "base") in caught.value.problem.do


@pytest.mark.parametrize(
    "changes", [{"peft_type": "IA3"}, {"rank_pattern": {"q_proj": 2}}, {"bias": "all"}, {"target_modules": None}]
)
def test_other_kinds_of_adapters_are_refused_by_name(changes: dict[str, object]) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]} | changes
    with pytest.raises(DataError) as caught:
        rules_of_config(config, "here")
    assert next(iter(changes)) in caught.value.problem.what


def test_a_critic_trains_its_adapters_and_its_head_and_saves_them_merged(
    character_directory: Path, tmp_path: Path
) -> None:
    critic = load_critic(character_directory, seed=0)
    add_adapters(critic, AdapterRules(rank=2), seed=0)
    names = [name for name, parameter in critic.named_parameters() if parameter.requires_grad]
    assert [name for name in names if "lora_" not in name] == ["score.weight"]
    given = (IDS, torch.arange(12), torch.zeros(12, dtype=torch.int64))
    optimizer = torch.optim.SGD([p for _, p in critic.named_parameters() if p.requires_grad], lr=0.002)
    for _ in range(3):
        critic.values(PackedTokens(*given)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        expected = critic.values(PackedTokens(*given))
    critic.save_pretrained(tmp_path / "critic")
    with torch.no_grad():
        found = load_critic(tmp_path / "critic", seed=5).values(PackedTokens(*given))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
