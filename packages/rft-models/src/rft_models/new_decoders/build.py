"""A new decoder with random weights and a tokenizer, as a complete Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rft_models.files.directories import no_progress_bars
from rft_models.new_decoders.configurations import configuration
from rft_models.new_decoders.sizes import NewDecoderSizes, decoder_sizes
from rft_models.new_decoders.weights import draw_decoder_weights
from rft_models.own_decoder.registration import register_own_decoder
from rft_models.settings import DecoderSettings
from rft_models.tokenization.tokenizer import HfTokenizer, load_tokenizer


def build_new_decoder(
    directory: str | Path, chosen: DecoderSettings, tokenizer_directory: str | Path, *, seed: int
) -> Path:
    """Write a decoder of the chosen architecture to `directory`, with the tokenizer of another; returns the directory.

    The same settings, tokenizer and seed write the same bytes.

    Raises:
        OptionsError: sizes that do not fit together.
        DataError: there is no tokenizer in `tokenizer_directory`, or it is damaged.
    """
    tokenizer = load_tokenizer(tokenizer_directory)
    sizes = decoder_sizes(chosen, vocab_size=tokenizer.vocab_size)
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    with no_progress_bars():
        new_model(sizes, tokenizer, seed=seed).save_pretrained(str(path))
    tokenizer.save_pretrained(path)
    return path


def new_model(sizes: NewDecoderSizes, tokenizer: HfTokenizer, *, seed: int) -> Any:
    """Return the transformers model of these sizes with its first weights, in float32."""
    from transformers import AutoModelForCausalLM

    register_own_decoder()
    config = configuration(sizes, tokenizer.hf_tokenizer)
    with torch.random.fork_rng(devices=[]):  # its own initialization draws from the global generator
        model = AutoModelForCausalLM.from_config(config)
    draw_decoder_weights(model, seed=seed, std=sizes.init_std, num_layers=sizes.num_layers)
    return model
