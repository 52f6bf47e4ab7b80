"""A vision-language architecture that transformers does not have: LLaVA's layers, class token and all patches kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from rft_models.families.image_layout import Grid, ImageLayout, SmallestImage
from rft_models.families.tiny_vision import VisionSizes, text_part

MARKER = "<picture>"


class PatchwiseConfig(LlavaConfig):
    """Configuration that a directory's config.json names by "patchwise"."""

    model_type = "patchwise"


class PatchwiseForConditionalGeneration(LlavaForConditionalGeneration):
    """The whole model."""

    config_class = PatchwiseConfig


class PatchwiseImages(ImageLayout):
    """Squares of one size with a feature for each patch and one for the image; positions on one axis."""

    def smallest(self) -> SmallestImage:
        """Return the one size of the tower."""
        side = int(self.tower.image_size)
        return SmallestImage((3, side, side), None, (side // int(self.tower.patch_size)) ** 2 + 1)

    def arguments(self, pixels: Sequence[Tensor], grids: Sequence[Grid | None]) -> dict[str, Tensor]:
        """Return the pixel values as [N, 3, H, W]."""
        del grids
        return {"pixel_values": torch.stack(list(pixels))}


class TinyPatchwise:
    """Small models of this architecture."""

    special_tokens = (MARKER,)

    def config(self, tokenizer: Any, sizes: VisionSizes) -> Any:
        """Return the configuration of a model for the tokenizer."""
        return PatchwiseConfig(
            text_config={"model_type": "llama", **text_part(tokenizer, sizes)},
            vision_config={
                "model_type": "clip_vision_model",
                "hidden_size": sizes.vision_hidden,
                "intermediate_size": sizes.vision_ffn,
                "num_hidden_layers": sizes.vision_layers,
                "num_attention_heads": sizes.vision_heads,
                "image_size": sizes.image_size,
                "patch_size": sizes.patch_size,
                "projection_dim": sizes.hidden,
            },
            image_token_index=tokenizer.convert_tokens_to_ids(MARKER),
            vision_feature_select_strategy="full",
            vision_feature_layer=-1,
            tie_word_embeddings=True,
        )

    def processor(self, tokenizer: Any, sizes: VisionSizes) -> Any:
        """Return the processor of texts and images."""
        side = {"height": sizes.image_size, "width": sizes.image_size}
        return LlavaProcessor(
            CLIPImageProcessor(size=side, crop_size=side),
            tokenizer,
            patch_size=sizes.patch_size,
            vision_feature_select_strategy="full",
            num_additional_image_tokens=1,
            image_token=MARKER,
            chat_template=tokenizer.chat_template,
        )


def register() -> None:
    """Make the classes known to transformers."""
    AutoConfig.register("patchwise", PatchwiseConfig, exist_ok=True)
    AutoModelForImageTextToText.register(PatchwiseConfig, PatchwiseForConditionalGeneration, exist_ok=True)
