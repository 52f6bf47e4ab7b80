"""Pixel range of images, from the user's settings and the model's own processor.

Either bound alone keeps the processor's other one. Where the two then cross, or the range holds no image, nothing
would be done with the given one: that is an error with both numbers.
"""

from __future__ import annotations

from typing import Any

from rft_core.errors import OptionsError
from rft_models.families.vision import VisionFamily
from rft_models.vision.image_files import PixelRules


def pixel_range(rules: PixelRules, family: VisionFamily, image_processor: Any) -> tuple[int, int] | None:
    """Return the (fewest, most) pixels passed to the processor; None: nothing is passed.

    Qwen's processors scale to a range of pixels; LLaVA's to one size, so that nothing is left to choose.

    Raises:
        OptionsError: a range for a processor of one size, one below what a feature covers, or bounds that cross.
    """
    scales = rules.min_pixels is not None or (rules.max_pixels is not None and rules.oversize == "downscale")
    if not family.layout.scales:
        if scales:
            raise _fixed_size(family)
        return None
    if rules.max_pixels is None and rules.min_pixels is None:
        return None
    own_least, own_most = int(image_processor.size["shortest_edge"]), int(image_processor.size["longest_edge"])
    least = own_least if rules.min_pixels is None else rules.min_pixels
    largest = own_most if rules.max_pixels is None else rules.max_pixels
    side = int(image_processor.patch_size) * int(image_processor.merge_size)
    if largest < side**2:
        raise _below_one_feature(largest, side)
    if least > largest:
        raise _crossing(rules, own_least, own_most, side)
    return least, largest


def _fixed_size(family: VisionFamily) -> OptionsError:
    return OptionsError(
        code="images.fixed_size",
        what=f"max_pixels or min_pixels is set for a {family.name} model",
        where="--max_pixels, --min_pixels",
        why="its processor scales every image to one size, that of its vision tower",
        do="leave both out",
    )


def _below_one_feature(most: int, side: int) -> OptionsError:
    return OptionsError(
        code="images.below_one_feature",
        what=f"max_pixels = {most:,}, but one feature of this model covers {side} x {side} = {side**2:,} pixels",
        where="--max_pixels",
        why="the smallest image has one feature, so no image could be scaled down that far",
        do=f"--max_pixels {side**2}",
    )


def _crossing(rules: PixelRules, own_least: int, own_most: int, side: int) -> OptionsError:
    """Return the error for a single given bound that is beyond the processor's other one."""
    if rules.max_pixels is None:
        assert rules.min_pixels is not None
        return OptionsError(
            code="images.beyond_processor",
            what=f"min_pixels = {rules.min_pixels:,}, but the model's processor scales down to {own_most:,} pixels "
            "at most",
            where="--min_pixels",
            why="an image cannot be enlarged to more than it is scaled down to",
            do=f"--min_pixels {rules.min_pixels} --max_pixels {rules.min_pixels} (or --min_pixels {own_most})",
        )
    return OptionsError(
        code="images.beyond_processor",
        what=f"max_pixels = {rules.max_pixels:,}, but the model's processor enlarges to {own_least:,} pixels at least",
        where="--max_pixels",
        why="an image cannot be scaled down to less than it is enlarged to",
        do=f"--max_pixels {rules.max_pixels} --min_pixels {side**2} (or --max_pixels {own_least})",
    )
