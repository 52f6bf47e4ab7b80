"""Sizes and parts of the small vision-language models that are made on the spot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


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


class TinyVision(Protocol):
    """Maker of small models of one architecture."""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Tokens of the architecture that a tokenizer is extended by."""
        ...

    def config(self, tokenizer: Any, sizes: VisionSizes) -> Any:
        """Return transformers' configuration of a model for the tokenizer, which has the special tokens."""
        ...

    def processor(self, tokenizer: Any, sizes: VisionSizes) -> Any:
        """Return transformers' processor of texts and images."""
        ...


def text_part(tokenizer: Any, sizes: VisionSizes) -> dict[str, Any]:
    """Return the configuration of the decoder under the names that most families use."""
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
