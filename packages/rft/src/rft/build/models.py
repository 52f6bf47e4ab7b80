"""Arguments of model loading from settings: tokenizer, head chunks, checkpointing, freezing."""

from __future__ import annotations

from rft_models.families.custom import load_model_code
from rft_models.layers.gradient_checkpointing import Checkpointing
from rft_models.policy.freezing import FreezeRules
from rft_models.settings import ModelSettings, WeightsSettings
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_models.vision.processor import load_processor


def codec_of(settings: WeightsSettings) -> HfTokenizer:
    """The tokenizer, with the image processor of a vision model, after the user's model code has run."""
    load_model_code(settings.model_code)
    return load_processor(settings.pretrain)


def head_chunk_size(settings: ModelSettings) -> int | None:
    """Rows of the head computed at once; None lets the size of the logits decide."""
    return settings.chunk_size if settings.fused_linear_logprob else None


def checkpointing_of(settings: ModelSettings) -> Checkpointing | None:
    """Return the gradient checkpointing of the settings; None: nothing is recomputed."""
    return Checkpointing.of(
        settings.gradient_checkpointing, settings.gradient_checkpointing_mode, settings.gradient_checkpointing_every
    )


def freezing_of(settings: ModelSettings) -> FreezeRules:
    """Return the rules of the parameters that are not trained."""
    return FreezeRules.of(settings.freeze_prefix, settings.train_only_tokens_from)
