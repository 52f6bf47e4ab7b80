"""Texts as a reward model reads them, in training as in scoring."""

from __future__ import annotations

from pathlib import Path

from rft_models.reward_model.encoding import RewardTextEncoder
from rft_models.reward_model.loading import new_reward_model
from rft_models.reward_model.scorer import RewardTextScorer
from rft_models.reward_model.spec import RewardSpec


def test_training_texts_have_the_tokens_that_are_scored(character_directory: Path) -> None:
    model = new_reward_model(character_directory, RewardSpec(), seed=5)
    assert model.tokenizer is not None
    encoder, scorer = RewardTextEncoder(model.tokenizer), RewardTextScorer(model)
    assert encoder.encode("1+1=", (), "2")[0] == scorer.token_ids("1+1=", (), "2")
    assert not encoder.takes_images
