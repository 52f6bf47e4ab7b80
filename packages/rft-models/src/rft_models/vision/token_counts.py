"""Token counts of prompts with images, from the sizes of the images alone: for plans, which decode nothing."""

from __future__ import annotations

from rft_models.vision.processor import HfProcessor


class PlannedImages(HfProcessor):
    """Processor that counts the tokens of images without reading them.

    Example: `PlannedImages(tokenizer).image_tokens(4032, 3024, most_pixels=200_704)`.
    """

    def __init__(self, tokenizer: HfProcessor) -> None:
        super().__init__(tokenizer, tokenizer.processor, tokenizer.family, tokenizer.image_token_id, tokenizer.pixels)
        self._found: dict[tuple[int, int, int | None], int | None] = {}

    @property
    def scales(self) -> bool:
        """Return true where a cap on pixels changes the number of features; LLaVA scales all images to one size."""
        return self.family.layout.scales

    @property
    def least_pixels(self) -> int:
        """Pixels that smaller images are enlarged to."""
        return self._range[0] if self._range else int(self.processor.image_processor.size["shortest_edge"])

    @property
    def pixels_of_token(self) -> int:
        """Pixels that one feature covers; 0 where every image has the same number of features."""
        if not self.scales:
            return 0
        processor = self.processor.image_processor
        return (int(processor.patch_size) * int(processor.merge_size)) ** 2

    def text_tokens(self, text: str) -> int:
        """Count the tokens of a prompt in which each image is one placeholder."""
        return len(self._as_processor_does(self._with_own_markers(text)))

    def image_tokens(self, width: int, height: int, most_pixels: int | None = None) -> int | None:
        """Count the features of an image of this size; None where the processor refuses its shape.

        `most_pixels` stands in for the cap of this tokenizer.
        """
        key = (width, height, most_pixels)
        if key not in self._found:
            self._found[key] = self._counted(*key)
        return self._found[key]

    def _counted(self, width: int, height: int, most_pixels: int | None) -> int | None:
        if not self.scales:
            return self.num_image_tokens(width, height)
        processor = self.processor.image_processor
        own = (int(processor.size["shortest_edge"]), int(processor.size["longest_edge"]))
        lower, upper = self._range or own
        lower, upper = (lower, upper) if most_pixels is None else (min(lower, most_pixels), most_pixels)
        try:
            patches = processor.get_number_of_image_patches(height, width, {"min_pixels": lower, "max_pixels": upper})
        except (ValueError, ZeroDivisionError):
            return None
        return int(patches) // int(processor.merge_size) ** 2
