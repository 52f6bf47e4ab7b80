"""Small models and tokenizers made on the spot, written as complete Hugging Face directories.

They need no download, so a run on a laptop, a test and a benchmark start from the same files. The
weights are a function of the seed and each parameter's name; nothing else draws from them.
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from rft_core.errors import OptionsError
from rft_core.keyed_random import derive_key, keyed_normal
from rft_models.files.directories import no_progress_bars
from rft_models.tokenization.byte_level import EOS_TOKEN, PAD_TOKEN, bpe_tokenizer

DIGITS_AND_OPERATORS = string.digits + "+-*=() \n"
"""Characters of integer arithmetic."""


def build_character_model(
    directory: str | Path,
    *,
    alphabet: str = DIGITS_AND_OPERATORS,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    ffn: int = 384,
    seed: int = 0,
    max_positions: int = 256,
    kv_heads: int | None = None,
    init_std: float = 0.02,
) -> Path:
    """Build a Qwen2 decoder over single characters with tied embeddings; returns the directory.

    Vocabulary: <pad> = 0, <eos> = 1, then `alphabet` in order, each character once.

    Raises:
        OptionsError: sizes that do not fit together.
    """
    tokenizer = build_character_tokenizer(alphabet)
    return build_decoder(
        directory,
        tokenizer,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads or heads,
        ffn=ffn,
        max_positions=max_positions,
        seed=seed,
        init_std=init_std,
    )


def build_decoder(
    directory: str | Path,
    tokenizer: Any,
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    max_positions: int,
    seed: int,
    init_std: float = 0.02,
) -> Path:
    """Build a Qwen2 decoder with tied embeddings for `tokenizer`, random weights of `seed`; returns the directory."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    _check_sizes(hidden, heads, kv_heads)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):  # its own initialization draws from the global generator
        model = Qwen2ForCausalLM(config)
    draw_weights(model, seed=seed, std=init_std)
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    with no_progress_bars():
        model.save_pretrained(str(path))
    tokenizer.save_pretrained(str(path))
    return path


@torch.no_grad()
def draw_weights(model: torch.nn.Module, *, seed: int, std: float = 0.02) -> None:
    """Normal(0, std) for matrices, 0 for biases, 1 for norms; each from its own key of (seed, name).

    The padding row of the embedding is drawn like every other. transformers leaves it zero, and a
    zero row that is sampled goes through RMSNorm with a gradient of 1 / sqrt(eps), a thousand
    times that of its neighbours.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:  # the padding row too: zeros there would have gradients a thousand times larger
            parameter.copy_(keyed_normal(parameter.shape, derive_key(seed, f"weight:{name}")) * std)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def build_character_tokenizer(alphabet: str) -> Any:
    """Build a transformers tokenizer with one token a character; unknown characters are refused by `HfTokenizer`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = list(dict.fromkeys(alphabet))
    if not characters:
        raise OptionsError(
            code="build.empty_alphabet",
            what="the alphabet is empty",
            where="alphabet",
            why="a character tokenizer has one token for each character of the alphabet",
            do=f"alphabet {string.digits!r}",
        )
    vocab = {token: number for number, token in enumerate([PAD_TOKEN, EOS_TOKEN, *characters])}
    backend = Tokenizer(models.WordLevel(vocab=vocab))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD_TOKEN, eos_token=EOS_TOKEN)


def build_bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Byte-level BPE trained on `texts`, with <pad> = 0, <eos> = 1 and a one-line-a-message chat template.

    Every text can be encoded: the 256 bytes are part of the vocabulary. Texts are normalized and split as
    Qwen2's are (each digit is a token), so that a loader that goes by the model's family gives the same ids.

    Raises:
        OptionsError: `vocab_size` below 258 (two special tokens and 256 bytes).
    """
    return bpe_tokenizer(texts, vocab_size)


def _check_sizes(hidden: int, heads: int, kv_heads: int) -> None:
    if hidden % heads == 0 and (hidden // heads) % 2 == 0 and heads % kv_heads == 0:
        return
    raise OptionsError(
        code="build.sizes",
        what=f"hidden = {hidden}, heads = {heads}, kv_heads = {kv_heads}",
        where="hidden, heads, kv_heads",
        why="hidden / heads must be an even whole number (rotary pairs), and heads a multiple of kv_heads",
        do=f"--hidden {max(2, hidden // (2 * heads) * 2) * heads} --heads {heads} --kv_heads {heads}",
    )
