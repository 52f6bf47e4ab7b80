"""The reward model that is trained: a new head from settings, or the one that a directory has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rft.stages.reward_head import head_spec, is_reward_model, reward_model_to_train, take_head, trained_spec
from rft_core.errors import OptionsError
from rft_core.packed_tokens import PackedTokens
from rft_models.lora import files
from rft_models.lora.adapters import AdapterRules
from rft_models.policy.adaptation import add_adapters
from rft_models.reward_model.loading import load_reward_model
from rft_models.settings import RewardHeadSettings, TrainedWeightsSettings
from rft_models.tiny_models.text import build_character_model

FLOAT = torch.float32


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_character_model(tmp_path_factory.mktemp("m") / "plain", hidden=16, layers=2, heads=2, ffn=16)


def test_settings_name_the_head() -> None:
    spec = head_spec(
        RewardHeadSettings(heads_types="a, b", heads_weights="1,0.5", pooling_method="attn", probing_layer=1)
    )
    assert (spec.heads, spec.weights, spec.pooling, spec.layer) == (("a", "b"), (1.0, 0.5), "attention", 1)
    default = head_spec(RewardHeadSettings())
    assert (default.heads, default.weights, default.is_classifier) == (("score",), (1.0,), True)
    with pytest.raises(OptionsError) as caught:
        head_spec(RewardHeadSettings(heads_types="a,b", heads_weights="1"))
    assert (caught.value.problem.code, caught.value.problem.do) == ("rm.head_weights", "--heads_weights 1,1")


def test_a_reward_model_keeps_its_head(plain: Path, tmp_path: Path) -> None:
    settings = RewardHeadSettings(heads_types="a,b")
    assert not is_reward_model(plain)
    assert trained_spec(plain, settings).heads == ("a", "b")
    chosen = TrainedWeightsSettings(pretrain=str(plain))
    made = reward_model_to_train(chosen, head_spec(settings), plain, seed=3, dtype=FLOAT, device="cpu")
    assert made.head.training
    made.save_pretrained(tmp_path / "rm")
    assert is_reward_model(tmp_path / "rm")
    assert trained_spec(tmp_path / "rm", RewardHeadSettings()).heads == ("a", "b")
    again = reward_model_to_train(chosen, made.spec, tmp_path / "rm", seed=4, dtype=FLOAT, device="cpu")
    assert torch.equal(again.head.score.weight, made.head.score.weight)
    with pytest.raises(OptionsError) as caught:
        trained_spec(tmp_path / "rm", RewardHeadSettings(heads_types="c"))
    assert caught.value.problem.code == "rm.other_head"


def test_the_new_head_follows_from_the_seed(plain: Path) -> None:
    chosen = TrainedWeightsSettings(pretrain=str(plain))
    heads = [
        reward_model_to_train(
            chosen, head_spec(RewardHeadSettings()), plain, seed=seed, dtype=FLOAT, device="cpu"
        ).head.score.weight
        for seed in (1, 1, 2)
    ]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


@pytest.mark.parametrize("head", [RewardHeadSettings(), RewardHeadSettings(pooling_method="attn", probing_layer=1)])
def test_adapters_are_folded_in_when_a_reward_model_is_saved(
    plain: Path, tmp_path: Path, head: RewardHeadSettings
) -> None:
    chosen, spec = TrainedWeightsSettings(pretrain=str(plain)), head_spec(head)
    made = reward_model_to_train(chosen, spec, plain, seed=3, dtype=FLOAT, device="cpu").eval()
    adapters = add_adapters(made, AdapterRules(rank=2), seed=1, base=plain)
    with torch.no_grad():
        for _, weight in adapters.named_parameters():  # as a step would have left them: B begins at zero
            weight += 0.1 * torch.arange(weight.numel()).reshape(weight.shape).sin()
    trained = {name for name, weight in made.named_parameters() if weight.requires_grad}
    assert {name for name, _ in made.head_parameters()} < trained
    made.save_pretrained(tmp_path / "rm")
    again = load_reward_model(tmp_path / "rm")
    assert again.adapters is None
    assert {name for name, _ in made.saved_parameters()} == {name for name, _ in again.named_parameters()}
    ids = torch.arange(1, 8)
    text = PackedTokens(ids, torch.arange(7), torch.zeros_like(ids))
    assert torch.allclose(again.score_matrix(text), made.score_matrix(text), atol=1e-5)
    # what a run continues from: the adapters by themselves, on the weights that they were trained on, and the head
    other = reward_model_to_train(chosen, spec, plain, seed=8, dtype=FLOAT, device="cpu").eval()
    files.load(add_adapters(other, AdapterRules(rank=2), seed=9, base=plain), tmp_path / "rm" / files.FOLDER)
    take_head(other, tmp_path / "rm")
    assert torch.equal(other.score_matrix(text), made.score_matrix(text))
