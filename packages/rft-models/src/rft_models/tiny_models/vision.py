"""Small vision-language models made on the spot, written as complete Hugging Face directories.

Weights are a function of the seed and each parameter's name, as in `rft_models.tiny_models.text`. Image processor,
tokenizer with the family's special tokens and chat template are beside them, so that `AutoProcessor` reads the
directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rft_core.errors import OptionsError
from rft_models.families.tiny_vision import VisionSizes as VisionSizes
from rft_models.families.vision import VISION_FAMILIES
from rft_models.files.directories import no_progress_bars
from rft_models.tiny_models.text import draw_weights
from rft_models.vision.image_files import require_image_packages


def build_vision_model(
    directory: str | Path,
    tokenizer: Any,
    *,
    model_type: str = "qwen2_5_vl",
    sizes: VisionSizes | None = None,
    seed: int = 0,
    init_std: float = 0.02,
) -> Path:
    """Build a vision-language model of random weights for `tokenizer`, which gets the family's special tokens.

    Args:
        directory: where it is written.
        tokenizer: of transformers, as `build_character_tokenizer` and `build_bpe_tokenizer` make them.
        model_type: one of `VISION_FAMILIES`.
        sizes: of its parts.
        seed: draws the weights.
        init_std: standard deviation of matrices.

    Raises:
        OptionsError: an architecture that is not known, sizes that do not fit together, or a package for images that is
            not installed.
    """
    require_image_packages()
    from transformers import AutoModelForImageTextToText

    sizes = sizes or VisionSizes()
    _check(model_type, sizes)
    family = VISION_FAMILIES[model_type]
    add_vision_tokens(tokenizer, model_type)
    with torch.random.fork_rng(devices=[]):  # their own initialization draws from the global generator
        model = AutoModelForImageTextToText.from_config(family.tiny.config(tokenizer, sizes))
    draw_weights(model, seed=seed, std=init_std)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    with no_progress_bars():
        model.save_pretrained(str(path))
    family.tiny.processor(tokenizer, sizes).save_pretrained(str(path))
    tokenizer.save_pretrained(str(path))
    return path


def add_vision_tokens(tokenizer: Any, model_type: str) -> None:
    """Special tokens of the family behind the vocabulary, and its chat template, in place."""
    family = VISION_FAMILIES[model_type]
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.tiny.special_tokens)})
    tokenizer.chat_template = chat_template(family.marker, tokenizer.eos_token)


def chat_template(marker: str, eos_token: str) -> str:
    """One line a message, `role: content`, an image part as its marker; an assistant's turn ends with the end token."""
    content = (
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '" + marker + "' }}"
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    )
    return (
        "{% for message in messages %}{{ message['role'] + ': ' }}" + content + "{{ '\\n' }}"
        "{% if message['role'] == 'assistant' %}{{ '" + eos_token + "' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )


def _check(model_type: str, sizes: VisionSizes) -> None:
    if model_type not in VISION_FAMILIES:
        raise OptionsError(
            code="build.vision_family",
            what=f"model_type {model_type!r}; known are {', '.join(VISION_FAMILIES)}",
            where="model_type",
            why="each architecture has its own parts",
            do="model_type qwen2_5_vl",
        )
    head, vision_head = sizes.hidden // sizes.heads, sizes.vision_hidden // sizes.vision_heads
    fits = sizes.hidden % sizes.heads == 0 and sizes.heads % sizes.kv_heads == 0 and head % 2 == 0 and head >= 8
    if fits and sizes.vision_hidden % sizes.vision_heads == 0 and vision_head % 4 == 0 and _sides_fit(sizes):
        return
    raise OptionsError(
        code="build.vision_sizes",
        what=f"hidden / heads = {sizes.hidden} / {sizes.heads} with {sizes.kv_heads} kv_heads, "
        f"vision_hidden / vision_heads = {sizes.vision_hidden} / {sizes.vision_heads}, "
        f"image_size {sizes.image_size}, window_size {sizes.window_size}, patch_size {sizes.patch_size}",
        where="sizes",
        why="a decoder's head has an even width of 8 or more, a tower's a multiple of 4, and images and windows are "
        "whole numbers of 2 x 2 patches",
        do=f"image_size {8 * sizes.patch_size}, window_size {4 * sizes.patch_size}",
    )


def _sides_fit(sizes: VisionSizes) -> bool:
    return sizes.image_size % (2 * sizes.patch_size) == 0 and sizes.window_size % (2 * sizes.patch_size) == 0
