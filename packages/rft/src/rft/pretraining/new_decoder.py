"""The model that a pre-training run begins with: made once from its settings, under the hash of what it is made of.

A new model is a function of its shape, its tokenizer and the seed, so that the directory may be removed at any time:
the next start, or the resume of a run, writes the same bytes again.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path

from rft.decoder_sizes import model_sizes
from rft.hub.run_settings import local_directory
from rft.pretraining.trained_tokenizer import KINDS, tokenizer_directory
from rft.process.cache import cache_directory, written_once
from rft.resolved import Resolved
from rft.settings import PretrainSettings
from rft_models.new_decoders.build import build_new_decoder
from rft_models.new_decoders.parameter_counts import parameter_counts
from rft_models.new_decoders.sizes import decoder_sizes
from rft_models.tokenization.tokenizer import load_tokenizer
from rft_trainer.data.token_shards.open import require_texts

DECODERS = "decoders"
"""Directory of new models in the cache."""
_FORMAT = 1
"""Counts up when the same settings make other weights."""


def with_decoder(resolved: Resolved[PretrainSettings]) -> Resolved[PretrainSettings]:
    """Return the settings with the directory of the model that the run begins with, and with its steps in windows.

    Where `--pretrain` names a model, it is that one; else a new one is written, whole or not at all.

    Raises:
        OptionsError: sizes that do not fit together.
        DataError: no text to train a tokenizer on, or a directory without one.
    """
    settings = resolved.settings
    require_texts(settings.data)
    chosen: dict[str, object] = {}
    if not settings.model.pretrain:
        chosen["pretrain"] = str(new_decoder(settings))
    return resolved.with_values(chosen) if chosen else resolved


def new_decoder(settings: PretrainSettings) -> Path:
    """Return the directory of the new model that the settings describe; it is written where it is not there yet."""
    named = settings.model.tokenizer
    tokenizer = tokenizer_directory(settings) if named in KINDS else Path(local_directory(named, "--tokenizer"))
    seed = settings.run.seed
    content = {
        "format": _FORMAT,
        "decoder": asdict(settings.decoder),
        "tokenizer": [
            (file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in sorted(tokenizer.iterdir())
        ],
        "seed": seed,
    }
    return written_once(
        DECODERS, content, lambda target: build_new_decoder(target, settings.decoder, tokenizer, seed=seed)
    )


def decoder_line(settings: PretrainSettings) -> str:
    """Describe the model that a run begins with, once its directory is named."""
    directory = Path(settings.model.pretrain)
    if directory.parent != cache_directory() / DECODERS:
        sizes, _ = model_sizes(directory)
        return f"{sizes.parameters:,} parameters, with the weights of {directory}"
    sizes = decoder_sizes(settings.decoder, vocab_size=load_tokenizer(directory).vocab_size)
    return f"{parameter_counts(sizes).describe(sizes)}, random weights, in {directory}"
