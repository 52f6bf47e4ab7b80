"""Settings of the images of prompts. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RowImageSettings:
    """The column of the images of prompts."""

    images_key: str = ""
    """Column that holds the images of a row (a path, bytes or a data URI, or a list of them); empty = text alone."""

    limit_mm_image_per_prompt: int = field(default=-1, metadata={"minimum": -1})
    """Maximum number of images in one row (with `images_key`); a row with more is an error; -1 = no limit."""

    mixed_mm_data: bool = False
    """Allow rows without an image beside rows with one (with `images_key`)."""


@dataclass(frozen=True, kw_only=True)
class ImageSettings(RowImageSettings):
    """The images of prompts, for a vision-language model."""

    max_pixels: int = field(default=0, metadata={"minimum": 0})
    """Scale an image with more pixels than this down before the model sees it; 0 = the limit of the model's
    processor."""

    min_pixels: int = field(default=0, metadata={"minimum": 0})
    """Scale an image with fewer pixels than this up before the model sees it; 0 = the limit of the model's
    processor."""


@dataclass(frozen=True, kw_only=True)
class ControlledImageSettings(ImageSettings):
    """The images of prompts, and the control experiment."""

    shuffle_images: bool = False
    """Control experiment: give the images of each row to another row, so that they carry no information (with
    `images_key`)."""


@dataclass(frozen=True, kw_only=True)
class ScoredImageSettings(RowImageSettings):
    """The images of prompts, for a model that has the limits of pixels of its training, and the control experiment."""

    shuffle_images: bool = False
    """Control experiment: give the images of each row to another row, so that they carry no information (with
    `images_key`)."""


@dataclass(frozen=True, kw_only=True)
class GenerateImageSettings(ImageSettings):
    """The images of prompts, from rows or given one by one."""

    image: str = ""
    """Image files that go with `prompt`, joined by commas; empty = none."""
