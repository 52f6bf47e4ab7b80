"""Positions on three axes, as Qwen's vision-language models number tokens (mRoPE, arXiv 2409.12191, section 2.1).

A text token has the same number p on all axes, and the next has p + 1. The features of an image that begins at p have
(p + frame, p + row, p + column) of their grid of merged patches; what follows goes on behind the largest of these
rows and columns. With an image of 2 x 3 features behind two text tokens:

    token      a  b  i  i  i  i  i  i  c
    frame      0  1  2  2  2  2  2  2  5
    row        0  1  2  2  2  3  3  3  5
    column     0  1  2  3  4  2  3  4  5
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rft_models.families.image_layout import PlacedImage

if TYPE_CHECKING:
    from torch import Tensor


def positions_of(length: int, images: Sequence[PlacedImage], merge: int) -> Tensor:
    """[3, L] int64 of the tokens of a segment; `merge` patches a side become one feature."""
    import torch

    parts: list[Tensor] = []
    begin = next_position = 0
    for image in images:
        assert image.grid is not None, "a model with three axes has images with grids"
        parts.append(_text(image.first - begin, next_position))
        next_position += image.first - begin
        frames, rows, columns = image.grid[0], image.grid[1] // merge, image.grid[2] // merge
        coordinates = torch.cartesian_prod(torch.arange(frames), torch.arange(rows), torch.arange(columns))
        parts.append(coordinates.view(-1, 3).T + next_position)
        next_position += max(rows, columns)
        begin = image.first + image.num_tokens
    parts.append(_text(length - begin, next_position))
    return torch.cat(parts, 1)


def position_offset(images: Sequence[PlacedImage], merge: int) -> int:
    """Return position minus index of every token behind the images; 0 or below."""
    shift = 0
    for image in images:
        assert image.grid is not None
        shift += max(image.grid[1] // merge, image.grid[2] // merge) - image.num_tokens
    return shift


def _text(length: int, first: int) -> Tensor:
    import torch

    return (torch.arange(length) + first).expand(3, length)
