"""Base of the ways in which vision-language architectures cut images into features and place these in a row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Grid = tuple[int, int, int]
"""(frames, rows, columns) of an image's patches."""


class PlacedImage(NamedTuple):
    """One image of a prompt: its run of placeholders, and its patches."""

    first: int
    """Index of its first placeholder in the prompt."""
    num_tokens: int
    grid: Grid | None
    """None where every image has the same number of patches."""


class SmallestImage(NamedTuple):
    """Sizes of the smallest image that a vision tower takes."""

    shape: tuple[int, ...]
    """Shape of its pixel values."""
    grid: Grid | None
    num_tokens: int


class ImageLayout(ABC):
    """Images of one model, made from its configuration (`config.json`, with the tower's part as `vision_config`)."""

    scales: ClassVar[bool] = False
    """Whether the image processor keeps an image's size within a range of pixels; false: all become one size."""
    three_axes: ClassVar[bool] = False
    """Whether the decoder's positions are (frame, row, column) triples; false: one number a token."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.tower = config.vision_config

    @property
    def patches_per_token(self) -> int:
        """Patches that become one placeholder of the prompt."""
        return 1

    @abstractmethod
    def smallest(self) -> SmallestImage:
        """Return the smallest image that the tower takes."""

    @abstractmethod
    def arguments(self, pixels: Sequence[Tensor], grids: Sequence[Grid | None]) -> dict[str, Tensor]:
        """Return the tower's arguments for the pixel values of several images, on the device of these."""

    def row_arguments(
        self, spans: Sequence[tuple[int, int, int]], shape: tuple[int, int], device: torch.device
    ) -> dict[str, Tensor]:
        """Return what the whole model's forward takes besides for rows of `shape`.

        `spans` are (row, first column, number of placeholders) of each image.
        """
        del spans, shape, device
        return {}

    def num_features(self, grid: Grid | None) -> int | None:
        """Return the features of an image of this grid; None where the grid does not determine them."""
        del grid
        return None

    def positions(self, length: int, images: Sequence[PlacedImage]) -> Tensor:
        """Return [3, L] int64 of the tokens of a prompt, of a decoder with three axes."""
        raise TypeError(f"{type(self).__name__} numbers tokens on one axis")

    def position_offset(self, images: Sequence[PlacedImage]) -> int:
        """Return position minus index of every token behind the images; 0 or below."""
        del images
        return 0
