"""The policy that is trained, loaded as its settings say."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from rft_models.layers.gradient_checkpointing import Checkpointing
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.freezing import FreezeRules
from rft_models.policy.load import load_policy
from rft_models.policy.load_on_meta import load_on_meta
from rft_models.settings import AdapterSettings, ModelSettings, TrainedWeightsSettings
from rft_models.tokenization.tokenizer import HfTokenizer


def load_for_training(
    directory: str | Path,
    settings: ModelSettings,
    adapter: AdapterSettings,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    tokenizer: HfTokenizer,
    on_meta: bool = False,
) -> CausalPolicy:
    """Load the weights in `directory` in train mode; with `on_meta` they stay in their files (`load_on_meta`).

    Raises as `load_policy` does.
    """
    load = load_on_meta if on_meta else partial(load_policy, load_in_4bit=adapter.load_in_4bit)
    policy = load(
        directory,
        dtype=dtype,
        device=device,
        gradient_checkpointing=checkpointing_of(settings),
        flash_attn=settings.flash_attn,
        freeze=freezing_of(settings),
        head_chunk_size=head_chunk_size(settings),
        tokenizer=tokenizer,
    )
    return policy.train()


def head_chunk_size(settings: ModelSettings) -> int | None:
    """Rows of the head computed at once; None lets the size of the logits decide."""
    return settings.chunk_size if settings.fused_linear_logprob else None


def checkpointing_of(settings: TrainedWeightsSettings) -> Checkpointing | None:
    """Return the gradient checkpointing of the settings; None: nothing is recomputed."""
    return Checkpointing.of(
        settings.gradient_checkpointing, settings.gradient_checkpointing_mode, settings.gradient_checkpointing_every
    )


def freezing_of(settings: ModelSettings) -> FreezeRules:
    """Return the rules of the parameters that are not trained."""
    return FreezeRules.of(settings.freeze_prefix, settings.train_only_tokens_from)
