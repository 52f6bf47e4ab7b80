"""The reward model that is trained: a new head from settings, or the one that a directory has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rft.stages.reward_head import head_spec, is_reward_model, reward_model_to_train, trained_spec
from rft_core.errors import OptionsError
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
