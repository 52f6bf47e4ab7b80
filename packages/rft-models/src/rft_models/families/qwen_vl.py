"""Images of Qwen2-VL, Qwen2.5-VL and Qwen3-VL (arXiv 2409.12191, 2502.13923): squares of patches become features.

An image keeps its shape within a range of pixels, and its features have positions on three axes, see `mrope`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rft_models.families import mrope
from rft_models.families.image_layout import Grid, ImageLayout, PlacedImage, SmallestImage
from rft_models.families.tiny_vision import VisionSizes, text_part

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MARKER = "<|vision_start|><|image_pad|><|vision_end|>"


class QwenImages(ImageLayout):
    """Images of any shape, three axes of positions."""

    scales = True
    three_axes = True

    @property
    def merge(self) -> int:
        """Patches a side that become one feature."""
        return int(getattr(self.tower, "spatial_merge_size", 1))

    @property
    def patches_per_token(self) -> int:
        """Patches of the square that becomes one feature."""
        return self.merge**2

    def smallest(self) -> SmallestImage:
        """Return an image of two features side by side."""
        grid = (1, self.merge, 2 * self.merge)
        tower = self.tower
        width = int(tower.in_channels) * int(tower.temporal_patch_size) * int(tower.patch_size) ** 2
        return SmallestImage((grid[0] * grid[1] * grid[2], width), grid, 2)

    def arguments(self, pixels: Sequence[Tensor], grids: Sequence[Grid | None]) -> dict[str, Tensor]:
        """Return the patches of all images one after another, and the grid of each."""
        import torch

        return {
            "pixel_values": torch.cat(list(pixels)),
            "image_grid_thw": torch.tensor(list(grids), device=pixels[0].device),
        }

    def row_arguments(
        self, spans: Sequence[tuple[int, int, int]], shape: tuple[int, int], device: torch.device
    ) -> dict[str, Tensor]:
        """Return [B, L] int64: 1 at placeholders, 0 at text."""
        import torch

        kinds_BL = torch.zeros(shape, dtype=torch.int64, device=device)
        for row, first, number in spans:
            kinds_BL[row, first : first + number] = 1
        return {"mm_token_type_ids": kinds_BL}

    def num_features(self, grid: Grid | None) -> int | None:
        """Return the squares of patches in the grid."""
        assert grid is not None, "a model with three axes has images with grids"
        return grid[0] * (grid[1] // self.merge) * (grid[2] // self.merge)

    def positions(self, length: int, images: Sequence[PlacedImage]) -> Tensor:
        """Return the positions of `mrope`."""
        return mrope.positions_of(length, images, self.merge)

    def position_offset(self, images: Sequence[PlacedImage]) -> int:
        """Return the offset of `mrope`: an image advances positions by its longer side alone."""
        return mrope.position_offset(images, self.merge)


class TinyQwenVl:
    """Small models of one of the three architectures."""

    special_tokens = (
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
    )

    def __init__(self, model_type: str, processor: str, video_processor: str) -> None:
        self._model_type = model_type
        self._classes = (processor, video_processor)

    def config(self, tokenizer: Any, sizes: VisionSizes) -> Any:
        """Return the configuration of a model for the tokenizer."""
        from transformers import AutoConfig

        half = sizes.hidden // sizes.heads // 2
        side = half * 5 // 16 if self._model_type == "qwen3_vl" else half * 3 // 8
        text = text_part(tokenizer, sizes)
        text["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [half - 2 * side, side, side],
        }
        if self._model_type == "qwen3_vl":
            text["head_dim"] = 2 * half
            text["rope_parameters"]["mrope_interleaved"] = True
        return AutoConfig.for_model(
            self._model_type,
            text_config=text,
            vision_config=self._tower(sizes),
            image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
            video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
            vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
            vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
            tie_word_embeddings=True,
        )

    def processor(self, tokenizer: Any, sizes: VisionSizes) -> Any:
        """Return the processor of texts and images."""
        import transformers as every

        transformers: Any = every
        processor, videos = self._classes
        patches = {"patch_size": sizes.patch_size, "merge_size": 2, "temporal_patch_size": 2}
        limits = {"shortest_edge": (2 * sizes.patch_size) ** 2, "longest_edge": sizes.image_size**2}
        return getattr(transformers, processor)(
            transformers.Qwen2VLImageProcessor(size=limits, **patches),
            tokenizer,
            getattr(transformers, videos)(size=limits, **patches),
            chat_template=tokenizer.chat_template,
        )

    def _tower(self, sizes: VisionSizes) -> dict[str, Any]:
        shared = {"depth": sizes.vision_layers, "num_heads": sizes.vision_heads, "patch_size": sizes.patch_size}
        shared |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
        wide = {
            "hidden_size": sizes.vision_hidden,
            "out_hidden_size": sizes.hidden,
            "intermediate_size": sizes.vision_ffn,
        }
        if self._model_type == "qwen2_vl":  # its names: hidden_size is that of the decoder
            ratio = max(1, round(sizes.vision_ffn / sizes.vision_hidden))  # a whole number there
            return shared | {"embed_dim": sizes.vision_hidden, "hidden_size": sizes.hidden, "mlp_ratio": ratio}
        if self._model_type == "qwen2_5_vl":
            last = sizes.vision_layers - 1
            return shared | wide | {"window_size": sizes.window_size, "fullatt_block_indexes": [last]}
        num_positions = (sizes.image_size // sizes.patch_size) ** 2
        deep = list(range(min(sizes.vision_layers, sizes.layers, 2)))
        return shared | wide | {"num_position_embeddings": num_positions, "deepstack_visual_indexes": deep}
