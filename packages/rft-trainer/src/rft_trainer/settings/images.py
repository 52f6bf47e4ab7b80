"""Settings of the images of prompts. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """The images of prompts, for a vision-language model."""

    images_key: str = ""
    """Column that holds the images of a row (a path, bytes or a data URI, or a list of them); empty = text alone."""

    limit_mm_image_per_prompt: int = field(default=-1, metadata={"minimum": -1})
    """Most images of one row (with `images_key`); a row with more is an error; -1 = any number."""

    mixed_mm_data: bool = False
    """Allow rows without an image beside rows with one (with `images_key`)."""

    max_pixels: int = field(default=0, metadata={"minimum": 0})
    """Pixels of an image above which it is scaled down before the model sees it; 0 = as the model's processor says."""

    min_pixels: int = field(default=0, metadata={"minimum": 0})
    """Pixels of an image below which it is enlarged; 0 = as the model's processor says."""


@dataclass(frozen=True, kw_only=True)
class ControlledImageSettings(ImageSettings):
    """The images of prompts, and the control experiment."""

    shuffle_images: bool = False
    """Control: the images of each row go to another row, so that they say nothing about it (with `images_key`)."""


@dataclass(frozen=True, kw_only=True)
class GenerateImageSettings(ImageSettings):
    """The images of prompts, from rows or given one by one."""

    image: str = ""
    """Image files that go with `prompt`, joined by commas; empty = none."""
