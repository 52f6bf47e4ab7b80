"""A policy that is trained has what its settings say: train mode, frozen weights, rows of the head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rft_models.policy.load_for_training import head_chunk_size, load_for_training
from rft_models.settings import AdapterSettings, ModelSettings
from rft_models.tokenization.tokenizer import load_tokenizer


@pytest.mark.parametrize("on_meta", [False, True])
def test_the_policy_is_in_train_mode_and_its_frozen_weights_want_no_gradient(
    character_directory: Path, on_meta: bool
) -> None:
    settings = ModelSettings(
        pretrain=str(character_directory), freeze_prefix="model.embed_tokens", fused_linear_logprob=True, chunk_size=7
    )
    policy = load_for_training(
        character_directory,
        settings,
        AdapterSettings(),
        dtype=torch.float32,
        device="cpu",
        tokenizer=load_tokenizer(character_directory),
        on_meta=on_meta,
    )
    assert policy.model.training
    assert policy.head_chunk_size == 7
    assert (policy.pending_weights is not None) == on_meta
    wants = {name: parameter.requires_grad for name, parameter in policy.named_parameters()}
    assert not wants["model.embed_tokens.weight"]
    assert sum(wants.values()) == len(wants) - 1


def test_the_rows_of_the_head_are_left_open_unless_it_is_computed_in_chunks() -> None:
    assert head_chunk_size(ModelSettings(pretrain="m", chunk_size=7)) is None
