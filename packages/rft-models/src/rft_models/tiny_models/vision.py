"""Small vision-language models made on the spot, written as complete Hugging Face directories.

Weights are a function of the seed and each parameter's name, as in `rft_models.tiny_models.text`. Image processor,
tokenizer with the family's special tokens and chat template are beside them, so that `AutoProcessor` reads the
directory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rft_core.errors import OptionsError
from rft_models.families.vision import VISION_FAMILIES
from rft_models.files.directories import no_progress_bars
from rft_models.tiny_models.text import draw_weights
from rft_models.vision.image_files import require_image_packages

_QWEN_TOKENS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_LLAVA_TOKENS = ("<image>",)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSizes:
    """Sizes of decoder and vision tower; the defaults make a model of about 300,000 weights."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 192
    max_positions: int = 256
    vision_hidden: int = 64
    vision_layers: int = 2
    vision_heads: int = 4
    vision_ffn: int = 128
    patch_size: int = 4
    """Pixels a side of a patch; with Qwen's towers two by two patches become one feature."""
    image_size: int = 32
    """Pixels a side: what LLaVA scales every image to, and the square that Qwen's `max_pixels` holds."""
    window_size: int = 16
    """Pixels a side that a windowed layer of Qwen2.5-VL's tower attends in (its last layer sees the whole image)."""


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
    sizes = sizes or VisionSizes()
    _check(model_type, sizes)
    add_vision_tokens(tokenizer, model_type)
    with torch.random.fork_rng(devices=[]):  # their own initialization draws from the global generator
        model = _make_model(model_type, tokenizer, sizes)
    draw_weights(model, seed=seed, std=init_std)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    with no_progress_bars():
        model.save_pretrained(str(path))
    _make_processor(model_type, tokenizer, sizes).save_pretrained(str(path))
    tokenizer.save_pretrained(str(path))
    return path


def add_vision_tokens(tokenizer: Any, model_type: str) -> None:
    """Special tokens of the family behind the vocabulary, and its chat template, in place."""
    tokens = _LLAVA_TOKENS if model_type == "llava" else _QWEN_TOKENS
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    tokenizer.chat_template = chat_template(VISION_FAMILIES[model_type].marker, tokenizer.eos_token)


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


def _make_model(model_type: str, tokenizer: Any, sizes: VisionSizes) -> Any:
    from transformers import AutoModelForImageTextToText

    config = _llava_config(tokenizer, sizes) if model_type == "llava" else _qwen_config(model_type, tokenizer, sizes)
    return AutoModelForImageTextToText.from_config(config)


def _text_part(tokenizer: Any, sizes: VisionSizes) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": sizes.max_positions,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "tie_word_embeddings": True,
    }


def _qwen_config(model_type: str, tokenizer: Any, sizes: VisionSizes) -> Any:
    from transformers import AutoConfig

    half = sizes.hidden // sizes.heads // 2
    side = half * 5 // 16 if model_type == "qwen3_vl" else half * 3 // 8
    text = _text_part(tokenizer, sizes)
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [half - 2 * side, side, side],
    }
    if model_type == "qwen3_vl":
        text["head_dim"] = 2 * half
        text["rope_parameters"]["mrope_interleaved"] = True
    return AutoConfig.for_model(
        model_type,
        text_config=text,
        vision_config=_qwen_tower(model_type, sizes),
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )


def _qwen_tower(model_type: str, sizes: VisionSizes) -> dict[str, Any]:
    shared = {"depth": sizes.vision_layers, "num_heads": sizes.vision_heads, "patch_size": sizes.patch_size}
    shared |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
    wide = {"hidden_size": sizes.vision_hidden, "out_hidden_size": sizes.hidden, "intermediate_size": sizes.vision_ffn}
    if model_type == "qwen2_vl":  # its names: hidden_size is that of the decoder
        ratio = max(1, round(sizes.vision_ffn / sizes.vision_hidden))  # a whole number there
        return shared | {"embed_dim": sizes.vision_hidden, "hidden_size": sizes.hidden, "mlp_ratio": ratio}
    if model_type == "qwen2_5_vl":
        return shared | wide | {"window_size": sizes.window_size, "fullatt_block_indexes": [sizes.vision_layers - 1]}
    num_positions = (sizes.image_size // sizes.patch_size) ** 2
    deep = list(range(min(sizes.vision_layers, sizes.layers, 2)))
    return shared | wide | {"num_position_embeddings": num_positions, "deepstack_visual_indexes": deep}


def _llava_config(tokenizer: Any, sizes: VisionSizes) -> Any:
    from transformers import AutoConfig

    tower = {
        "model_type": "clip_vision_model",
        "hidden_size": sizes.vision_hidden,
        "intermediate_size": sizes.vision_ffn,
        "num_hidden_layers": sizes.vision_layers,
        "num_attention_heads": sizes.vision_heads,
        "image_size": sizes.image_size,
        "patch_size": sizes.patch_size,
        "projection_dim": sizes.hidden,
    }
    return AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", **_text_part(tokenizer, sizes)},
        vision_config=tower,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(sizes.image_size // sizes.patch_size) ** 2,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )


def _make_processor(model_type: str, tokenizer: Any, sizes: VisionSizes) -> Any:
    import transformers as every

    transformers: Any = every
    if model_type == "llava":
        side = {"height": sizes.image_size, "width": sizes.image_size}
        images = transformers.CLIPImageProcessor(size=side, crop_size=side)
        return transformers.LlavaProcessor(
            images,
            tokenizer,
            patch_size=sizes.patch_size,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=tokenizer.chat_template,
        )
    kinds = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}
    videos = "Qwen3VLVideoProcessor" if model_type == "qwen3_vl" else "Qwen2VLVideoProcessor"
    patches = {"patch_size": sizes.patch_size, "merge_size": 2, "temporal_patch_size": 2}
    limits = {"shortest_edge": (2 * sizes.patch_size) ** 2, "longest_edge": sizes.image_size**2}
    return getattr(transformers, kinds[model_type])(
        transformers.Qwen2VLImageProcessor(size=limits, **patches),
        tokenizer,
        getattr(transformers, videos)(size=limits, **patches),
        chat_template=tokenizer.chat_template,
    )
