"""Images of LLaVA (arXiv 2304.08485): all are scaled to one size, and each patch becomes one feature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rft_models.families.image_layout import Grid, ImageLayout, SmallestImage
from rft_models.families.tiny_vision import VisionSizes, text_part

if TYPE_CHECKING:
    from torch import Tensor

MARKER = "<image>"


class LlavaImages(ImageLayout):
    """One size of images, one axis of positions."""

    def smallest(self) -> SmallestImage:
        """Return the one size of the tower."""
        side = int(self.tower.image_size)
        patches = (side // int(self.tower.patch_size)) ** 2
        has_class_token = self.tower.model_type == "clip_vision_model"
        dropped = self.config.vision_feature_select_strategy == "default"
        return SmallestImage((3, side, side), None, patches + int(has_class_token) - int(dropped))

    def arguments(self, pixels: Sequence[Tensor], grids: Sequence[Grid | None]) -> dict[str, Tensor]:
        """Return the pixel values as [N, 3, H, W]."""
        import torch

        del grids
        return {"pixel_values": torch.stack(list(pixels))}


class TinyLlava:
    """Small models with a CLIP tower and a Llama decoder."""

    special_tokens = (MARKER,)

    def config(self, tokenizer: Any, sizes: VisionSizes) -> Any:
        """Return the configuration of a model for the tokenizer."""
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
            text_config={"model_type": "llama", **text_part(tokenizer, sizes)},
            vision_config=tower,
            image_token_index=tokenizer.convert_tokens_to_ids(MARKER),
            image_seq_length=(sizes.image_size // sizes.patch_size) ** 2,
            vision_feature_layer=-1,
            tie_word_embeddings=True,
        )

    def processor(self, tokenizer: Any, sizes: VisionSizes) -> Any:
        """Return the processor of texts and images."""
        import transformers as every

        transformers: Any = every
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
