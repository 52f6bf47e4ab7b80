"""Prepared images of a prompt: the inputs of the model's own forward, and the positions of their features.

`Media` is made by `HfProcessor.encode_media` and passed along with the token ids of its prompt; only the model and
the engine read its contents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rft_models.families.image_layout import PlacedImage


@dataclass(frozen=True, slots=True, eq=False)
class ImageInputs:
    """One image as the vision tower takes it; equal to another where the digest is."""

    pixel_values: Tensor
    """Float32 on the host. Qwen: [patches, channels x frames x height x width of a patch]; LLaVA: [channels, H, W]."""
    grid: tuple[int, int, int] | None
    """(frames, rows, columns) of patches; None where every image has the same number of them (LLaVA)."""
    num_tokens: int
    """Features, and placeholders in the prompt."""
    digest: str
    """Of the pixel values and the grid."""

    @classmethod
    def of(cls, pixel_values: Tensor, grid: tuple[int, int, int] | None, num_tokens: int) -> ImageInputs:
        """Make the inputs of one image with their digest."""
        values = pixel_values.contiguous()
        digest = hashlib.sha256(repr((tuple(values.shape), str(values.dtype), grid, num_tokens)).encode())
        digest.update(values.numpy().tobytes())
        return cls(values, grid, num_tokens, digest.hexdigest())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ImageInputs) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True, slots=True)
class Media:
    """The images of one prompt, in the order in which they are named.

    Example: a prompt of 12 tokens with one image of 4 features behind its third token has `spans == ((3, 4),)`.
    """

    images: tuple[ImageInputs, ...]
    spans: tuple[tuple[int, int], ...]
    """(first token, number of tokens) of each image's placeholders, counted from the prompt's first token."""
    image_token_id: int
    """What stands at the placeholders."""
    files: tuple[bytes, ...] = ()
    """The images as files (PNG, JPEG, ...) of the size that was given to the processor, for engines with their own."""
    processor_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options passed to the image processor beside its own configuration."""

    def __post_init__(self) -> None:
        assert self.images, "media of a prompt without images is None"
        assert len(self.images) == len(self.spans), f"{len(self.images)} images, {len(self.spans)} spans"
        counts = [image.num_tokens for image in self.images]
        assert counts == [number for _, number in self.spans], f"features {counts}, placeholders {self.spans}"

    @property
    def num_images(self) -> int:
        """Images of the prompt; the same one twice counts twice."""
        return len(self.images)

    @property
    def num_tokens(self) -> int:
        """Placeholders of all images."""
        return sum(image.num_tokens for image in self.images)

    @property
    def end(self) -> int:
        """Tokens from the prompt's first to the last placeholder: what has to stay of it at least."""
        return max(first + number for first, number in self.spans)

    @property
    def digest(self) -> str:
        """Digest of all images in order, for hashes of the data."""
        return hashlib.sha256("".join(image.digest for image in self.images).encode()).hexdigest()

    @property
    def placed(self) -> tuple[PlacedImage, ...]:
        """The images with their runs of placeholders, as layouts of images take them."""
        pairs = zip(self.images, self.spans, strict=True)
        return tuple(PlacedImage(first, number, image.grid) for image, (first, number) in pairs)

    def collapsed(self, token_ids: Sequence[int]) -> list[int]:
        """Return the prompt with one placeholder an image, for an engine that expands them itself."""
        dropped = {first + offset for first, number in self.spans for offset in range(1, number)}
        return [token for index, token in enumerate(token_ids) if index not in dropped]
